"""Dropout masks that depend on row, global position and feature, step and call alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensortrace.tracer.start.generator import key_of, mix_all, signed
from tensortrace.tracer.start.rows import Rows

Begin = int | tuple[tuple[int, int], ...]
"""The global index of a dimension's first element, or the runs of global indices that it consists of."""


class Shape(NamedTuple):
    """A local tensor as [rows, *rest]: how it is viewed so, and the global indices of the rest.

    ``merged`` is how many indices of the first dimension belong to one row, 0 where it is a dimension of
    its own; ``rows_dim`` where the rows lie. ``starts`` says where each further dimension begins in the
    whole.
    """

    rows_dim: int
    merged: int
    rest: tuple[int, ...]
    starts: tuple[Begin, ...]


def shape_of(
    shape: Sequence[int], rows: Rows, *, starts: Sequence[Begin] = (), merged: bool = False
) -> Shape | None:
    """Return how a tensor holds the rows, or None where it doesn't seem to.

    Rows come first, or second as in [positions, rows, …], or lie merged with heads or positions in the
    first dimension. ``starts`` are global offsets per dimension of the tensor as it is.
    """
    count = rows.numbers.shape[0]
    shape, starts = tuple(shape), tuple(starts) or (0,) * len(shape)
    if not shape or not count:
        return None
    second = len(shape) > 1 and shape[1] == count
    if not merged and second and shape[0] == rows.positions != count:
        return Shape(1, 0, (shape[0], *shape[2:]), (starts[0], *starts[2:]))
    if shape[0] == count and not merged:
        return Shape(0, 0, shape[1:], starts[1:])
    if not merged and second:
        return Shape(1, 0, (shape[0], *shape[2:]), (starts[0], *starts[2:]))
    if shape[0] % count == 0:
        each = shape[0] // count
        return Shape(0, each, (each, *shape[1:]), (starts[0], *starts[1:]))
    return None


def kept(key: int, p: float, rows: Rows, shape: Shape, device: torch.device) -> torch.Tensor:
    """Return which elements stay (bool), in the shape of the tensor, each with probability 1 - p.

    The 64-bit counter of an element is its row's key plus the sum over the further dimensions of global
    index times an odd number of that dimension; ``docs/start.md`` states it in full.
    """
    numbers = mix_all(rows.numbers.to(device) ^ signed(key))
    counters = numbers.reshape(-1, *(1 for _ in shape.rest))
    for dim, (size, start) in enumerate(zip(shape.rest, shape.starts, strict=True)):
        runs = ((start, start + size),) if isinstance(start, int) else start
        index = torch.cat([torch.arange(*run, device=device) for run in runs])
        step = signed(key_of(0, "dimension", dim) | 1)
        counters = counters + (index * step).reshape(-1, *(1 for _ in shape.rest[dim + 1 :]))
    upper = (mix_all(counters) >> 11) & ((1 << 53) - 1)
    stays = upper >= int(p * (1 << 53))
    if shape.merged:
        return stays.flatten(0, 1)
    return stays.movedim(0, shape.rows_dim)
