"""``--consistent-dropout``: masks by row, position, step and call, in place of the program's generator."""

from __future__ import annotations

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
from tensortrace.tracer.placements import split
from tensortrace.tracer.placements.descent import laid_out_as
from tensortrace.tracer.start.cuts import Unknown, starts_of
from tensortrace.tracer.start.generator import key_of
from tensortrace.tracer.start.masks import kept, shape_of
from tensortrace.tracer.start.numbering import Numbering
from tensortrace.tracer.start.refusal import refuse
from tensortrace.tracer.start.relay import Relay
from tensortrace.tracer.start.rows import Given, Rows, identify, padding_of
from tensortrace.tracer.types import INIT_STEP, ROOT

ALPHA = -1.7580993408473766
"""The negative saturation of SELU, which alpha dropout sets elements to."""

_ATTENTION = F.multi_head_attention_forward.__code__


class Site(NamedTuple):
    """One dropout call: the module around it, and its number there within a microbatch."""

    at: Moment
    name: str
    number: int


class Dropout:
    """Draws the masks of one process. Rows are those of the root forward that the call belongs to."""

    def __init__(self, hooks: Hooks, seed: int, *, padding: int | None = None) -> None:
        self._session = hooks.session
        self._modules = hooks.modules
        self._seed = seed
        self._rows: dict[Moment, Rows] = {}
        self._used: dict[Site, Rows] = {}
        self._numbering = Numbering(hooks.session.clock)
        self._padding = padding
        self._relay = Relay(hooks.session)

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

    def mask(self, tensor: torch.Tensor, p: float, *, features: bool, merged: bool) -> torch.Tensor:
        """Return which elements stay (bool); with ``features`` one for each row and channel.

        Ends the program where the rows of the tensor aren't known.
        """
        with guard.alone(), torch.no_grad(), unobserved():
            site, rows = self._site()
            local, spec = split(tensor)
            try:
                starts = starts_of(tensor, local, spec)
            except (Unknown, LayoutError) as error:
                refuse(f"dropout in {site.name}: which part of the whole this is can't be told: {error}")
            key = key_of(self._seed, "dropout", site.name, site.at.step, site.number)
            dims = 2 if features else local.dim()
            shape = rows and shape_of(local.shape[:dims], rows, starts=starts[:dims], merged=merged)
            if rows is None or shape is None:
                refuse(_unknown(site, tuple(local.shape), rows))
            stays = kept(key, p, rows, shape, local.device)
            stays = stays.reshape(*stays.shape, *(1 for _ in local.shape[dims:]))
            return stays if spec is None else laid_out_as(tensor, stays.expand(local.shape).contiguous())

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
            merged = sys._getframe(1).f_code is _ATTENTION
            dropped = apply(input, self.mask(input, p, features=features, merged=merged), p)
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
            rows = identify([(slot, split(tensor)[0]) for slot, tensor in given], self._padding)
        if rows is not None:
            self._rows[at] = rows
            self._relay.give(at, rows)

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
