"""A global tensor piece by piece: blocks of bounded size, and the local ranges that fill each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from tensortrace.tracer.geometry import Held, Interval, Intervals, LayoutError
from tensortrace.tracer.geometry_cover import one_copy

Read = Callable[[int, int, int], np.ndarray]
"""Rank, start, stop -> the elements [start, stop) of the rank's flattened local tensor, padding included."""

Slices = tuple[slice, ...]

_Common = tuple[int, int, int]


class Piece(NamedTuple):
    """What one rank gives to a block: read [start, stop) of its local elements, reshape, copy.

    ``copies`` are pairs of slices: into the block (flattened where ``flat``), out of what was read.
    """

    held: Held
    start: int
    stop: int
    shape: tuple[int, ...]
    copies: tuple[tuple[Slices, Slices], ...]


class Block(NamedTuple):
    """A box of the global tensor whose elements [start, stop) are consecutive in row-major order.

    ``offset`` and ``shape`` count elements per global dimension.
    """

    start: int
    stop: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def block_grid(shape: Sequence[int], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of boxes of at most ``most`` (at least one) elements, in row-major order.

    Each is consecutive in the flattened tensor: single along the first dimensions, then a range of one
    dimension, then whole. The grid depends on ``shape`` and ``most`` alone.
    """
    if 0 in shape:
        return
    dim, rest = len(shape), 1  # ``rest``: elements of one index of the dimension that is cut
    while dim > 0 and rest * shape[dim - 1] <= max(most, 1):
        dim -= 1
        rest *= shape[dim]
    if dim == 0:
        yield (0,) * len(shape), tuple(shape)
        return
    dim -= 1
    step = max(most, 1) // rest
    ones, inner = (1,) * dim, tuple(shape[dim + 1 :])
    for before in product(*(range(n) for n in shape[:dim])):
        for start in range(0, shape[dim], step):
            size = min(step, shape[dim] - start)
            yield (*before, start, *(0,) * len(inner)), (*ones, size, *inner)


def blocks(parts: Sequence[Held], most: int) -> Iterator[Block]:
    """Yield a global tensor in blocks of at most ``most`` elements, in row-major order.

    One part per region and contribution is used: the first rank's. What the parts don't cover is left out
    of the pieces; call ``check`` first.
    """
    if not parts:
        return
    chosen = one_copy(parts)
    shape = parts[0].region.global_shape
    for offset, size in block_grid(shape, most):
        start = _position(offset, shape)
        stop = start + math.prod(size)
        pieces = [
            piece
            for part in chosen
            for piece in (
                _flat_pieces(part, start, stop) if part.region.flat else _box_pieces(part, offset, size)
            )
        ]
        yield Block(start, stop, offset, size, tuple(pieces))


def fill(block: Block, read: Read) -> np.ndarray:
    """Return the values of a block: pieces put in place, contributions reduced in float64.

    Raises LayoutError where the pieces don't fill it.
    """
    by_partial: dict[tuple[int, ...], list[Piece]] = {}
    for piece in block.pieces:
        by_partial.setdefault(piece.held.partial, []).append(piece)
    if not by_partial:
        raise LayoutError(f"no rank holds elements [{block.start}, {block.stop})")
    first = block.pieces[0].held
    if len(by_partial) != math.prod(first.partial_shape):
        raise LayoutError(f"{len(by_partial)} of {math.prod(first.partial_shape)} contributions are there")
    filled = (_placed(block, by_partial[partial], read) for partial in sorted(by_partial))
    return reduce_contributions(filled, first.ops, first.partial_shape) if first.ops else next(filled)


def place(arrays: Mapping[int, np.ndarray], parts: Sequence[Held]) -> np.ndarray:
    """Return the global tensor from the ranks' local tensors: the case of one block.

    Padding is stripped; contributions are reduced in float64 (integers in int64). Raises LayoutError where
    elements are missing; overlaps are ``check``'s to find.
    """

    def read(rank: int, start: int, stop: int) -> np.ndarray:
        return arrays[rank].reshape(-1)[start:stop]

    if not parts:
        raise LayoutError("no rank holds any of the tensor")
    shape = parts[0].region.global_shape
    found = [fill(block, read) for block in blocks(parts, math.prod(shape))]
    return found[0] if found else np.empty(shape, arrays[parts[0].rank].dtype)


def reduce_contributions(
    arrays: Iterator[np.ndarray], ops: Sequence[str], sizes: Sequence[int]
) -> np.ndarray:
    """Return the reduction of all contributions; only one and the total are held at a time.

    ``ops`` are per axis: sum and avg mix, min, max, product (and ``premul_sum``, which is a sum) stand
    alone. Raises LayoutError for others.
    """
    kinds = {"sum" if op in ("avg", "premul_sum", "mean") else op for op in ops}
    if len(kinds) != 1 or not kinds <= _REDUCTIONS.keys():
        raise LayoutError("contributions cannot be reduced", found=", ".join(sorted(ops)))
    combine = _REDUCTIONS[kinds.pop()]
    first = next(arrays)
    wide = {"c": np.complex128, "f": np.float64}.get(first.dtype.kind, np.int64)
    total: np.ndarray = first.astype(wide)
    for other in arrays:
        combine(total, other.astype(wide), out=total)
    count = math.prod(size for size, op in zip(sizes, ops, strict=True) if op in ("avg", "mean"))
    return total / count if count != 1 else total


_REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def _placed(block: Block, pieces: Sequence[Piece], read: Read) -> np.ndarray:
    """Return one contribution to a block; the array that was read itself where it is all of it."""
    size = block.stop - block.start
    count = sum(_volume(into) for piece in pieces for into, _ in piece.copies)
    if count != size:
        what = f"elements [{block.start}, {block.stop}) are not all there"
        raise LayoutError(what, found=str(count), expected=str(size))
    values: np.ndarray | None = None
    for piece in pieces:
        part = read(piece.held.rank, piece.start, piece.stop).reshape(piece.shape)
        if len(piece.copies) == 1 and _volume(piece.copies[0][0]) == size == part.size:
            return part.reshape(block.shape)
        values = np.empty(block.shape, part.dtype) if values is None else values
        target = values.reshape(-1) if piece.held.region.flat else values
        for into, out_of in piece.copies:
            target[into] = part[out_of]
    return values if values is not None else np.empty(block.shape)


def _volume(slices: Slices) -> int:
    return math.prod(s.stop - s.start for s in slices)


def _position(index: Sequence[int], shape: Sequence[int]) -> int:
    found = 0
    for here, size in zip(index, shape, strict=True):
        found = found * size + here
    return found


def _common(intervals: Intervals, window: Interval) -> list[_Common]:
    """Return (start in the window, start in the local dimension, length) of what both have."""
    found, before = [], 0
    for start, stop in intervals:
        low, high = max(start, window[0]), min(stop, window[1])
        if low < high:
            found.append((low - window[0], before + low - start, high - low))
        before += stop - start
    return found


def _flat_pieces(part: Held, start: int, stop: int) -> list[Piece]:
    return [
        Piece(part, local, local + n, (n,), (((slice(into, into + n),), (slice(0, n),)),))
        for into, local, n in _common(part.region.dims[0], (start, stop))
    ]


def _box_pieces(part: Held, offset: Sequence[int], size: Sequence[int]) -> list[Piece]:
    """Return one piece per run of consecutive local elements; several only where intervals are."""
    windows = [(o, o + n) for o, n in zip(offset, size, strict=True)]
    common = [_common(found, window) for found, window in zip(part.region.dims, windows, strict=True)]
    if not all(common):
        return []
    cut = next((d for d, n in enumerate(size) if n != 1), max(len(size) - 1, 0))  # whole from here on
    return [_run(part, lead, common[cut + 1 :]) for lead in product(*common[: cut + 1])]


def _run(part: Held, lead: Sequence[_Common], inner: Sequence[Sequence[_Common]]) -> Piece:
    """Return the piece at one place along the leading dimensions; the inner ones are read whole."""
    rest = part.local_shape[len(lead) :]
    count = lead[-1][2] if lead else 1
    first = _position([local for _, local, _ in lead], part.local_shape[: len(lead)]) * math.prod(rest)
    into = tuple(slice(start, start + n) for start, _, n in lead)
    out_of = tuple(slice(0, n) for _, _, n in lead)
    copies = tuple(
        (
            (*into, *(slice(start, start + n) for start, _, n in more)),
            (*out_of, *(slice(local, local + n) for _, local, n in more)),
        )
        for more in product(*inner)
    )
    shape = (*(n for _, _, n in lead), *rest)
    return Piece(part, first, first + count * math.prod(rest), shape, copies)
