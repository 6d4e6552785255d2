"""Where the local part of an activation begins in the whole, along each of its dimensions."""

from __future__ import annotations

import math

import torch

from tensortrace.tracer.geometry import Region, placed, region
from tensortrace.tracer.placements import Spec
from tensortrace.tracer.placements.descent import descended_from


class Unknown(Exception):
    """Where a part begins cannot be told; says why."""


def starts_of(tensor: torch.Tensor, local: torch.Tensor, spec: Spec | None) -> tuple[int, ...]:
    """Return the global index of the first element along each dimension.

    ``local`` is what this rank holds of it, and ``spec`` its place where it is a DTensor. Of a plain tensor
    that was computed from the local part of one, the features begin where those of that part do: the last
    dimension of [rows, positions, features], the heads of [rows, heads, positions, positions]. Raises
    Unknown where that can't be told.
    """
    if spec is not None:
        if any(placement.kind == "partial" for placement in spec.placements):
            raise Unknown("it is a sum over ranks")
        return _begins(region(spec.shard(), spec.mesh, tuple(local.shape)))
    for origin in descended_from(tensor):
        if any(placement.kind in ("shard", "strided_shard") for placement in origin.placements):
            return _carried(origin, tuple(local.shape))
    return (0,) * local.dim()


def _carried(origin: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    part = placed(origin.shard(), origin.mesh)
    if part.shape == shape:
        return _begins(part)
    begins = _begins(part)
    if any(begins[:-1]) or part.shape[:-1] != part.global_shape[:-1]:
        raise Unknown(f"it was computed from a part, cut along a dimension before the last, of {part.shape}")
    if not part.shape[-1]:
        return (0,) * len(shape)
    dim = max(len(shape) - 3, 0) if len(shape) >= 4 else len(shape) - 1
    begin = begins[-1] * shape[dim] / part.shape[-1]
    if begin != math.floor(begin):
        raise Unknown(f"its {shape[dim]} heads do not divide the {part.shape[-1]} features they come from")
    return tuple(int(begin) if d == dim else 0 for d in range(len(shape)))


def _begins(part: Region) -> tuple[int, ...]:
    if any(len(intervals) > 1 for intervals in part.dims):
        raise Unknown("it lies in several pieces")
    return tuple(intervals[0][0] if intervals else 0 for intervals in part.dims)
