"""Which samples a forward computes on: a 64-bit number for each row of the root module's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from tensortrace.tracer.start.generator import mix_all

Given = Sequence[tuple[str, torch.Tensor]]
"""(slot, tensor) of what the root module was given, in order."""


ALL = 1 << 62
"""Instead of a last position: every position of the row counts."""


class Rows(NamedTuple):
    """The rows of one forward: int64 of shape [rows]; ``positions`` is None where the input has none."""

    numbers: torch.Tensor
    positions: int | None


def identify(given: Given, padding: int | None = None) -> Rows | None:
    """Return the rows of a forward by their content, or None where it was given no rows.

    The first integer matrix is taken for token ids, else the first tensor with dimensions. Of token ids,
    positions that a mask of the same shape leaves out don't count, or where there is no mask trailing
    ``padding``, so that a row is the same whatever it is padded to.
    """
    named = token_ids(given)
    if named is not None:
        tokens = named[1]
        return Rows(_fold(tokens.to(torch.int64), _valid(tokens, given, padding)), tokens.shape[1])
    first = next((t for _, t in given if t.dim() >= 1 and t.shape[0]), None)
    if first is None:
        return None
    bits = _bits(first.detach()).reshape(first.shape[0], -1)
    return Rows(_fold(bits, None), first.shape[1] if first.dim() >= 3 else None)


def token_ids(given: Given) -> tuple[str, torch.Tensor] | None:
    """Return slot and tensor of what is taken for token ids: the first integer matrix."""
    return next(((slot, t) for slot, t in given if t.dim() == 2 and _is_integer(t)), None)


class Piece(NamedTuple):
    """What a run of positions that one rank holds tells of each row; int64 of shape [rows] each.

    ``last`` is the last position that isn't padding, -1 where there is none, ALL where padding isn't left
    out. ``until`` sums the row's terms up to it, ``all`` those of all positions.
    """

    start: int
    last: torch.Tensor
    until: torch.Tensor
    all: torch.Tensor

    def written(self) -> list[object]:
        """Return numbers for JSON."""
        return [self.start, self.last.tolist(), self.until.tolist(), self.all.tolist()]

    @classmethod
    def read(cls, numbers: list[object]) -> Piece:
        """Return what ``written`` wrote."""
        start, *rest = numbers
        assert isinstance(start, int)
        return cls(start, *(torch.tensor(row, dtype=torch.int64) for row in rest))


def pieces(given: Given, runs: Sequence[tuple[int, int]], padding: int | None) -> list[Piece]:
    """Return what this rank's positions, the global ``runs`` one after the other, tell of its rows."""
    named = token_ids(given)
    assert named is not None
    tokens = named[1].to(torch.int64)
    masked = _valid(tokens, given, None)
    found, begin = [], 0
    for start, stop in runs:
        part = tokens[:, begin : begin + stop - start]
        at = torch.arange(start, stop, device=tokens.device)
        terms = mix_all(part + mix_all(at))
        if masked is not None:
            terms = torch.where(masked[:, begin : begin + stop - start], terms, 0)
        every = terms.sum(1)
        last, until = torch.full_like(every, ALL), every
        if masked is None and padding is not None:
            last = torch.where(part != padding, at, -1).amax(1)
            until = torch.where(at <= last[:, None], terms, 0).sum(1)
        found.append(Piece(start, last, until, every))
        begin += stop - start
    return found


def joined(found: Sequence[Piece], positions: int) -> Rows:
    """Return the rows that all pieces make together; ``positions`` is how many this rank holds."""
    top = torch.stack([piece.last for piece in found]).amax(0)
    total = torch.zeros_like(top)
    for piece in found:
        before = torch.where(top > piece.start, piece.all, 0)
        total = total + torch.where(piece.last == top, piece.until, before)
    return Rows(mix_all(torch.where(top < 0, 0, total)), positions)


def padding_of(modules: Sequence[nn.Module]) -> int | None:
    """Return the token that embeddings declare as padding, if any does."""
    found = (m.padding_idx for m in modules if isinstance(m, nn.Embedding) and m.padding_idx is not None)
    return next(found, None)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _valid(tokens: torch.Tensor, given: Given, padding: int | None) -> torch.Tensor | None:
    for slot, mask in given:
        if "mask" in slot and mask.shape == tokens.shape and not mask.is_floating_point():
            return mask == 0 if "padding_mask" in slot else mask != 0
    if padding is None:
        return None
    real = tokens != padding
    return real.flip(1).cumsum(1).flip(1) > 0


def _fold(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return mix(Σ mix(value + mix(position))) over the valid positions of each row."""
    position = mix_all(torch.arange(values.shape[1], device=values.device))
    terms = mix_all(values + position)
    if valid is not None:
        terms = torch.where(valid, terms, 0)
    return mix_all(terms.sum(1))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers; complex numbers as pairs of them."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        tensor = tensor.contiguous().view(integer)
    return tensor.to(torch.int64)
