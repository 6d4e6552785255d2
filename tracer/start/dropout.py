"""``--consistent-dropout``: masks by row, position, step and call, in place of the program's generator."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.geometry import LayoutError
from tensortrace.tracer.hooks import Hooks, guard
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.placements import Spec, split
from tensortrace.tracer.placements.descent import laid_out_as
from tensortrace.tracer.rules import LayoutFileError
from tensortrace.tracer.start.cuts import Unknown, starts_of
from tensortrace.tracer.start.generator import key_of
from tensortrace.tracer.start.masks import Begin, kept, shape_of
from tensortrace.tracer.start.numbering import Numbering
from tensortrace.tracer.start.refusal import refuse
from tensortrace.tracer.start.relay import Relay
from tensortrace.tracer.start.rows import (
    Given,
    Piece,
    Rows,
    identify,
    joined,
    padding_of,
    pieces,
    token_ids,
)
from tensortrace.tracer.start.spread import Runs, Spread
from tensortrace.tracer.types import INIT_STEP, ROOT

ALPHA = -1.7580993408473766
"""The negative saturation of SELU, which alpha dropout sets elements to."""

_MODULES = {
    module.forward.__code__
    for module in (
        nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    )
}  # fmt: skip
"""Modules whose whole input is dropped from: a rule of a layout file for the input tells how it lies."""

_ATTENTION = F.multi_head_attention_forward.__code__


class Site(NamedTuple):
    """One dropout call: the module around it, and its number there within a microbatch."""

    at: Moment
    name: str
    number: int


class Dropout:
    """Draws the masks of one process. Rows are those of the root forward that the call belongs to."""

    def __init__(
        self, hooks: Hooks, seed: int, *, padding: int | None = None, layout: str | None = None
    ) -> None:
        self._session = hooks.session
        self._modules = hooks.modules
        self._seed = seed
        self._rows: dict[Moment, Rows] = {}
        self._used: dict[Site, Rows] = {}
        self._numbering = Numbering(hooks.session.clock)
        self._padding = padding
        self._relay = Relay(hooks.session)
        self._spread = Spread(layout)
        self._by_position: tuple[int, int, Runs] | None = None

    def install(self) -> None:
        """Watch root forwards, and replace the functions that draw masks."""
        session = self._session
        session.on_root.append(self._root_began)
        session.clock.before_first.append(self._check)
        session.clock.before_close.append(self._forget)
        for name, whole in {
            "dropout": False,
            "dropout1d": True,
            "dropout2d": True,
            "dropout3d": True,
        }.items():
            session.patches.function(getattr(F, name), self._replacing(getattr(F, name), _scaled, whole))
        for name, whole in {"alpha_dropout": False, "feature_alpha_dropout": True}.items():
            session.patches.function(getattr(F, name), self._replacing(getattr(F, name), _saturated, whole))
        session.patches.bind()

    def active(self) -> bool:
        """Tell whether masks are ours: in a window, while the recording lasts."""
        return guard.is_active() and self._session.clock.step != INIT_STEP

    def mask(
        self, tensor: torch.Tensor, p: float, *, features: bool, merged: bool, is_input: bool = False
    ) -> torch.Tensor:
        """Return which elements stay (bool); with ``features`` one for each row and channel.

        ``is_input`` tells that the tensor is what the innermost module was given. Ends the program where the
        rows of the tensor aren't known.
        """
        with guard.alone(), torch.no_grad(), unobserved():
            site, rows = self._site()
            local, spec = split(tensor)
            starts = self._starts(site, tensor, local, spec, is_input=is_input)
            name = self._spread.name(site.name)
            key = key_of(self._seed, "dropout", name, site.at.step, site.number)
            dims = 2 if features else local.dim()
            shape = rows and shape_of(local.shape[:dims], rows, starts=starts[:dims], merged=merged)
            if rows is None or shape is None:
                refuse(_unknown(site, tuple(local.shape), rows))
            stays = kept(key, p, rows, shape, local.device)
            stays = stays.reshape(*stays.shape, *(1 for _ in local.shape[dims:]))
            return stays if spec is None else laid_out_as(tensor, stays.expand(local.shape).contiguous())

    def _starts(
        self, site: Site, tensor: torch.Tensor, local: torch.Tensor, spec: Spec | None, *, is_input: bool
    ) -> tuple[Begin, ...]:
        """Return where the local part begins along each dimension; ends the program where that's unknown."""
        shape = tuple(local.shape)
        try:
            if spec is None and is_input and (found := self._spread.begins(site.name, shape)) is not None:
                return found
            if self._by_position is None:
                return starts_of(tensor, local, spec)
            rows, positions, runs = self._by_position
            if len(shape) == 3 and shape[:2] == (rows, positions) != shape[1:]:
                return 0, runs, 0
            why = (
                "positions are spread over ranks, and the layout file has no rule for a Dropout's input here"
            )
        except (Unknown, LayoutError, LayoutFileError) as error:
            why = str(error)
        refuse(f"dropout in {site.name}: which part of the whole this is can't be told: {why}")

    def name(self) -> str:
        """Return the name of the module that is being called."""
        frame = self._modules.innermost()
        return ROOT if frame is None else frame.name

    def _replacing(
        self,
        original: Callable[..., torch.Tensor],
        apply: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        features: bool,
    ) -> Callable[..., torch.Tensor]:
        def dropout(
            input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> torch.Tensor:
            if not training or not 0 < p <= 1 or not self.active():
                return original(input, p, training, inplace)
            caller = sys._getframe(1).f_code
            stays = self.mask(
                input, p, features=features, merged=caller is _ATTENTION, is_input=caller in _MODULES
            )
            dropped = apply(input, stays, p)
            return input.copy_(dropped) if inplace else dropped

        return dropout

    def _site(self) -> tuple[Site, Rows | None]:
        """Return the call and its rows: a recomputed call has those of its first pass."""
        at = self._session.clock.forward_moment()
        name = self.name()
        site = Site(at, name, self._numbering.take(at, name))
        rows = self._used.get(site) if self._session.clock.is_recompute() else None
        rows = rows or self._rows.get(at) or self._relay.take(at)
        if rows is not None:
            self._used[site] = rows
            self._rows.setdefault(at, rows)
        return site, rows

    def _root_began(self, at: Moment, given: Given) -> None:
        with torch.no_grad(), unobserved():
            local = [(slot, split(tensor)[0]) for slot, tensor in given]
            rows = self._from_parts(at, local) or identify(local, self._padding)
        if rows is not None:
            self._rows[at] = rows
            self._relay.give(at, rows)

    def _from_parts(self, at: Moment, given: Given) -> Rows | None:
        """Return the rows whose positions are spread over ranks by hand; None where they aren't."""
        named = token_ids(given)
        try:
            known = named and self._spread.positions(named[0], tuple(named[1].shape))
        except LayoutFileError as error:
            refuse(f"dropout: {error}")
        if named is None or not known:
            return None
        self._by_position = (named[1].shape[0], named[1].shape[1], known.runs)
        mine = [piece.written() for piece in pieces(given, known.runs, self._padding)]
        texts = self._relay.exchange(at, json.dumps(mine), known.ranks)
        if texts is None:
            refuse("dropout: the ranks that hold the other positions of these rows told nothing of them")
        return joined([Piece.read(p) for text in texts for p in json.loads(text)], named[1].shape[1])

    def _check(self) -> None:
        modules = list(dict.fromkeys(module for module, _, _ in self._session.names.owned()))
        self._padding = padding_of(modules) if self._padding is None else self._padding
        for module in modules:
            if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
                name = self._session.names.module(module).name
                refuse(f"{name} draws dropout inside its kernel: set it to 0, or drop --consistent-dropout")
            if self._session.names.module(module).compiled:
                refuse("the model is compiled, and masks can be set in eager code only")

    def _forget(self) -> None:
        self._rows.clear()
        self._used.clear()
        self._numbering.clear()
        self._relay.forget()


def _scaled(tensor: torch.Tensor, stays: torch.Tensor, p: float) -> torch.Tensor:
    return tensor * (stays.to(tensor.dtype) * (1 / (1 - p) if p < 1 else 0.0))


def _saturated(tensor: torch.Tensor, stays: torch.Tensor, p: float) -> torch.Tensor:
    """Keep mean and variance of what SELU returns, as alpha dropout does."""
    if p == 1:
        return tensor * 0
    scale = 1 / math.sqrt((1 - p) * (1 + p * ALPHA**2))
    mask = stays.to(tensor.dtype)
    return (tensor * mask + ALPHA * (1 - mask)) * scale - scale * ALPHA * p


def _unknown(site: Site, shape: tuple[int, ...], rows: Rows | None) -> str:
    where = f"dropout in {site.name}"
    if rows is None:
        return f"{where}: the root module was given no tensor that tells its rows"
    return f"{where}: no dimension of {shape} holds the {rows.numbers.shape[0]} rows of the input"
