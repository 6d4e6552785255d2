"""Which elements of a global tensor a rank's local tensor holds: pure integers on intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.types import Box, Mesh, Placement, Shard

Interval = tuple[int, int]
"""Start and stop, in elements of one global dimension (of the flattened global tensor where flat)."""

Intervals = tuple[Interval, ...]
"""Disjoint intervals whose concatenation, in this order, is one local dimension. None is empty."""


class LayoutError(TraceError):
    """A shard that cannot be true of a tensor, or shards that do not make one."""


@dataclass(frozen=True)
class Region:
    """The elements of a global tensor that a local tensor holds.

    ``dims`` has the intervals of every global dimension; the region is their product. Where ``flat``, it has
    one entry: intervals of the flattened global tensor, and the local tensor has one dimension. Intervals
    that touch in order are joined, so that equal regions compare equal.
    """

    global_shape: tuple[int, ...]
    dims: tuple[Intervals, ...]
    flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape without padding."""
        return tuple(length(found) for found in self.dims)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> bool:
        """Whether this is all of the global tensor, in order."""
        return self == full_region(self.global_shape) or (
            self.flat and self.dims == (_joined([(0, math.prod(self.global_shape))]),)
        )


@dataclass(frozen=True)
class Held:
    """What one rank holds of a global tensor.

    ``local_shape`` includes padding. ``partial`` is the rank's coordinate along the axes over which the
    global value is a reduction, ``partial_shape`` their sizes and ``ops`` their operations, all empty where
    there is none. Ranks of equal region and ``partial`` hold replicas.
    """

    rank: int
    region: Region
    local_shape: tuple[int, ...]
    partial: tuple[int, ...] = ()
    partial_shape: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()


def length(intervals: Intervals) -> int:
    """Return the number of elements in some intervals."""
    return sum(stop - start for start, stop in intervals)


def full_region(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor."""
    return Region(tuple(shape), tuple(_joined([(0, size)]) for size in shape))


def held(rank: int, shard: Shard, mesh: Mesh, local_shape: Sequence[int]) -> Held:
    """Return what a rank holds; raises LayoutError as ``region`` does."""
    axes = [axis for axis, p in enumerate(shard.placements) if p.kind == "partial"]
    found = region(shard, mesh, local_shape)
    return Held(
        rank,
        found,
        tuple(local_shape) if math.prod(local_shape) else _padded(found.shape, shard.padding),
        tuple(shard.coordinate[axis] for axis in axes),
        tuple(mesh.shape[axis] for axis in axes),
        tuple(shard.placements[axis].op or "sum" for axis in axes),
    )


def region(shard: Shard, mesh: Mesh, local_shape: Sequence[int]) -> Region:
    """Return the elements that a local tensor holds, from its shard's boxes or else its placements.

    Placements are applied over the mesh's axes from first to last, as DTensor does: ``shard`` cuts what is
    left of a dimension into chunks of ceil(n / axis size), the last ones shorter or empty;
    ``strided_shard`` first cuts it into ``split_factor`` such chunks and takes a chunk of each.
    ``replicate``, ``partial`` and ``data`` cut nothing. ``local_shape`` includes padding. Where no global
    shape is stated and nothing is cut, it is the local one.

    Raises LayoutError naming what, found and expected: a coordinate outside the mesh, a box outside the
    global tensor, boxes that overlap or make no product, a local shape that doesn't fit.
    """
    local_shape = tuple(local_shape)
    _check_coordinate(shard, mesh)
    global_shape = _global_shape(shard, local_shape)
    if any(p.kind == "flat" for p in shard.placements):
        found = _flat_region(shard.boxes, global_shape, local_shape)
    elif shard.boxes:
        found = _box_region(shard.boxes, global_shape)
    else:
        found = Region(global_shape, _placed(shard, mesh, global_shape))
    _check_fits(found, local_shape, shard.padding)
    return found


def placed(shard: Shard, mesh: Mesh) -> Region:
    """Return the elements that placements give a rank, whatever tensor holds them; no boxes, not flat."""
    _check_coordinate(shard, mesh)
    if shard.global_shape is None:
        raise LayoutError("a tensor is cut, but its global shape is not stated")
    return Region(shard.global_shape, _placed(shard, mesh, shard.global_shape))


def chunk(intervals: Intervals, count: int, index: int) -> Intervals:
    """Return the ``index``-th of ``count`` chunks of a local dimension: ceil(n / count), the last shorter."""
    total = length(intervals)
    size = -(-total // count)
    return cut(intervals, min(index * size, total), min((index + 1) * size, total))


def cut(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Return the part [start, stop) of a local dimension, as intervals of the global one."""
    found: list[Interval] = []
    before = 0
    for first, last in intervals:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return tuple(found)


def _placed(shard: Shard, mesh: Mesh, global_shape: tuple[int, ...]) -> tuple[Intervals, ...]:
    dims = list(full_region(global_shape).dims)
    for axis, placement in enumerate(shard.placements):
        if placement.kind in ("shard", "strided_shard"):
            dim = _dim_of(placement, len(global_shape))
            dims[dim] = _cut_axis(dims[dim], placement, mesh.shape[axis], shard.coordinate[axis])
    return tuple(dims)


def _dim_of(placement: Placement, dims: int) -> int:
    dim = placement.dim
    if dim is None or not 0 <= dim < dims:
        raise LayoutError("a placement cuts a dimension that is not there", found=f"{dim} of {dims}")
    return dim


def _cut_axis(found: Intervals, placement: Placement, count: int, index: int) -> Intervals:
    if placement.kind == "shard":
        return chunk(found, count, index)
    pieces = placement.split_factor or 1
    return _joined(i for piece in range(pieces) for i in chunk(chunk(found, pieces, piece), count, index))


def _joined(intervals: Iterable[Interval]) -> Intervals:
    """Return the intervals without empty ones, those that touch in order made one."""
    found: list[Interval] = []
    for start, stop in intervals:
        if start >= stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _box_region(boxes: Sequence[Box], global_shape: tuple[int, ...]) -> Region:
    for box in boxes:
        _check_box(box, global_shape)
    if any(0 in box.shape for box in boxes):
        boxes = [box for box in boxes if 0 not in box.shape] or boxes[:1]
    axes = [
        tuple(dict.fromkeys((b.offset[dim], b.offset[dim] + b.shape[dim]) for b in boxes))
        for dim in range(len(global_shape))
    ]
    stated = [tuple((o, o + n) for o, n in zip(b.offset, b.shape, strict=True)) for b in boxes]
    if stated != list(product(*axes)):
        raise LayoutError(
            f"{len(boxes)} boxes make no local tensor",
            found=_shown(boxes),
            expected="the product of intervals per dimension, the last dimension varying fastest",
        )
    for dim, intervals in enumerate(axes):
        _check_disjoint(f"boxes overlap along dimension {dim}", intervals)
    return Region(global_shape, tuple(_joined(intervals) for intervals in axes))


def _flat_region(boxes: Sequence[Box], global_shape: tuple[int, ...], local_shape: tuple[int, ...]) -> Region:
    size = math.prod(global_shape)
    if not boxes:
        raise LayoutError("a flat placement has no box", expected="the interval of the flattened tensor")
    if len(local_shape) != 1:
        raise LayoutError(
            "a flat part has one dimension", found=f"local shape {local_shape}", expected="one dimension"
        )
    for box in boxes:
        _check_box(box, (size,))
    intervals = tuple((box.offset[0], box.offset[0] + box.shape[0]) for box in boxes)
    _check_disjoint("flat boxes overlap", intervals)
    return Region(global_shape, (_joined(intervals),), flat=True)


def _global_shape(shard: Shard, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    if shard.global_shape is not None:
        return shard.global_shape
    if shard.boxes or any(p.kind in ("shard", "strided_shard", "flat") for p in shard.placements):
        raise LayoutError("a tensor is cut, but its global shape is not stated")
    padding = shard.padding or (0,) * len(local_shape)
    return tuple(max(n - p, 0) for n, p in zip(local_shape, padding, strict=False))


def _padded(shape: tuple[int, ...], padding: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n + p for n, p in zip(shape, padding or (0,) * len(shape), strict=True))


def _check_coordinate(shard: Shard, mesh: Mesh) -> None:
    inside = len(shard.placements) == len(shard.coordinate) == len(mesh.shape) and all(
        0 <= index < size for index, size in zip(shard.coordinate, mesh.shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            f"mesh {shard.mesh!r} has no such place",
            found=f"coordinate {shard.coordinate} and {len(shard.placements)} placements",
            expected=f"a mesh of shape {mesh.shape}",
        )


def _check_box(box: Box, shape: tuple[int, ...]) -> None:
    inside = len(box.offset) == len(box.shape) == len(shape) and all(
        0 <= first and 0 <= size and first + size <= whole
        for first, size, whole in zip(box.offset, box.shape, shape, strict=True)
    )
    if not inside:
        raise LayoutError(
            "a box lies outside the global tensor", found=_shown([box]), expected=f"inside shape {shape}"
        )


def _check_disjoint(what: str, intervals: Intervals) -> None:
    ordered = sorted(i for i in intervals if i[0] < i[1])
    for (start, stop), (following, end) in pairwise(ordered):
        if following < stop:
            raise LayoutError(what, found=f"[{start}, {stop}) and [{following}, {end})", expected="disjoint")


def _check_fits(found: Region, local_shape: tuple[int, ...], padding: tuple[int, ...]) -> None:
    if not found.size and not math.prod(local_shape):
        return  # frameworks give empty shards any shape of no elements
    padded = len(padding) in (0, len(found.shape))
    if not padded or _padded(found.shape, padding) != local_shape:
        raise LayoutError(
            f"a part of a tensor of shape {found.global_shape} does not fit its layout",
            found=f"local shape {local_shape}" + (f" with padding {padding}" if padding else ""),
            expected=f"{found.shape}",
        )


def _shown(boxes: Sequence[Box]) -> str:
    texts = [
        "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(b.offset, b.shape, strict=False)) + "]" for b in boxes
    ]
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")
