"""Numbers that compare tensors which were never stored: linear, and the same however a tensor is cut.

A sketch of size K1 x K2 is Y[t1, t2] = Σ R[t1, leading indices] · C[t2, last index] · x over the elements of
a tensor, with signs R and C of ±1 that depend on *global* indices alone. So what ranks hold in parts, and
partial sums, add up to the sketch of the whole; and the mean of (Y_a - Y_b)² estimates ‖a - b‖². The signs
are specified in ``docs/format.md``. All sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""64 random bits for each index along a dimension: bit t is R's sign t, bit 32 + t is C's; set is -1."""

Numbers = NDArray[np.float64]
"""A sketch, [K1, K2]."""

Read = Callable[[int, int], NDArray[np.generic]]
"""Start, stop -> these elements of the flattened local tensor, real numbers."""

SIZE = (16, 16)
MOST = _SHIFT = 32
"""The most rows and columns of a sketch."""

FOLD = 64
"""A tensor of one dimension is taken as rows of so many elements: its index as two."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

_MOST_ROWS, _MOST_COLUMNS, _PRODUCT, _CHUNK = 1024, 1024, 16384, 1 << 17
"""Rows and columns taken at a time; elements of one product, and of all that one read gives.

A product of so many elements with 16 columns is computed by BLAS on the calling thread: beyond, it starts
threads of its own, whose time would be the training's.
"""

_SHORT = 256
"""Intervals shorter than this on average are taken element by element."""


class Side(NamedTuple):
    """One dimension of a local tensor: the words of its indices; what lies beyond them is padding."""

    words: Words
    size: int


class _Block(NamedTuple):
    """Rows [first, last) of the leading indices, columns [left, right), from a local position on."""

    position: int
    first: int
    last: int
    left: int
    right: int


def words(dim: int, indices: NDArray[np.integer]) -> Words:
    """Return the random bits of some indices (or 64-bit identities) along the ``dim``-th dimension.

    They are outputs number ``index`` of a splitmix64 whose state begins at a key of the dimension.
    """
    key = _mix(_mix(np.zeros(1, np.uint64)) ^ np.uint64(dim))
    with np.errstate(over="ignore"):
        return _mix(indices.astype(np.uint64) * _GOLDEN + key)


def sketch_product(read: Read, sides: Sequence[Side], size: tuple[int, int] = SIZE) -> Numbers:
    """Return the sketch of a local tensor whose indices are all combinations of those per dimension.

    Elements that aren't finite count as 0. A tensor without dimensions is every number of its sketch.
    """
    if not sides:
        return np.broadcast_to(_finite(read(0, 1)), size).copy()
    leading, last = _Leading(sides[:-1]), sides[-1]
    rows = math.prod(side.size for side in sides[:-1])
    columns = _signs(last.words, size[1], shift=_SHIFT)
    columns = np.pad(columns, ((0, last.size - len(columns)), (0, 0)))
    return _of_finite(
        read, lambda take: _add(take, [_Block(0, 0, rows, 0, last.size)], leading, columns, size)
    )


def sketch_flat(
    read: Read, sides: Sequence[Side], intervals: Sequence[tuple[int, int]], size: tuple[int, int] = SIZE
) -> Numbers:
    """Return the sketch of a local tensor of one dimension: intervals of a flattened tensor of these sides.

    Elements that aren't finite count as 0.
    """
    total = sum(stop - start for start, stop in intervals)
    if not total:
        return np.zeros(size)
    if not sides:
        return sketch_product(read, (), size)
    leading, columns = _Leading(sides[:-1]), _signs(sides[-1].words, size[1], shift=_SHIFT)
    if total < _SHORT * len(intervals):
        return _of_finite(read, lambda take: _scattered(take, intervals, leading, columns, size))
    blocks = list(_blocks(intervals, sides[-1].size))
    return _of_finite(read, lambda take: _add(take, blocks, leading, columns, size))


def whole_sides(shape: Sequence[int]) -> tuple[Side, ...]:
    """Return the sides of a flattened tensor of this shape; one of one dimension is folded."""
    folded = (-(-shape[0] // FOLD), FOLD) if len(shape) == 1 else shape
    return tuple(Side(words(dim, np.arange(n)), n) for dim, n in enumerate(folded))


def _mix(numbers: Words) -> Words:
    """Return one output of splitmix64 for each state."""
    with np.errstate(over="ignore"):
        numbers = numbers + _GOLDEN
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


def _signs(bits: Words, count: int, *, shift: int) -> Numbers:
    """Return the signs of shape [indices, count], from the bits ``shift`` and up."""
    taken = (bits[:, None] >> np.arange(shift, shift + count, dtype=np.uint64)) & np.uint64(1)
    return 1.0 - 2.0 * taken.astype("f8")


class _Leading:
    """The leading dimensions as one: each flattened index has the signs that are the product of its own."""

    def __init__(self, sides: Sequence[Side]) -> None:
        self._sides = sides
        self._shape = tuple(side.size for side in sides)
        self._padded = any(len(side.words) < side.size for side in sides)

    def signs(self, indices: NDArray[np.intp], count: int) -> Numbers:
        """Return R's signs, [indices, count]; 0 for padding."""
        bits = np.zeros(len(indices), np.uint64)
        real = np.ones(len(indices), bool)
        parts = np.unravel_index(indices, self._shape) if self._shape else ()
        for side, index in zip(self._sides, parts, strict=True):
            if self._padded:
                real &= index < len(side.words)
                index = np.minimum(index, max(len(side.words) - 1, 0))
            if len(side.words):
                bits ^= side.words[index]
        signs = _signs(bits, count, shift=0)
        return signs * real[:, None] if self._padded else signs


def _blocks(intervals: Sequence[tuple[int, int]], width: int) -> Iterator[_Block]:
    """Yield intervals of rows of ``width`` elements as the rest of a row, whole rows, the begin of a row."""
    position = 0
    for start, stop in intervals:
        while start < stop:
            row, left = divmod(start, width)
            if left or stop - start < width:
                block = _Block(position, row, row + 1, left, min(width, left + stop - start))
            else:
                block = _Block(position, row, stop // width, 0, width)
            yield block
            taken = (block.last - row) * (block.right - left)
            start, position = start + taken, position + taken


def _add(
    read: Read, blocks: Sequence[_Block], leading: _Leading, columns: Numbers, size: tuple[int, int]
) -> Numbers:
    total = np.zeros(size)
    for block in blocks:
        width = block.right - block.left
        step = max(1, min(_MOST_ROWS, _CHUNK // max(width, 1)))
        buffer = np.empty((min(step, block.last - block.first), width))
        for row in range(block.first, block.last, step):
            count = min(step, block.last - row)
            at = block.position + (row - block.first) * width
            buffer[:count] = read(at, at + count * width).reshape(count, width)
            over = leading.signs(np.arange(row, row + count), size[0])
            total += over.T @ _contracted(buffer[:count], columns[block.left : block.right])
    return total


def _contracted(values: Numbers, columns: Numbers) -> Numbers:
    """Return ``values @ columns``, in products that are small enough for one thread."""
    count, width = values.shape
    across = min(width, _MOST_COLUMNS)
    down = max(1, _PRODUCT * SIZE[1] // (across * columns.shape[1])) if across else 1
    found = np.zeros((count, columns.shape[1]))
    for left in range(0, width, across or 1):
        for top in range(0, count, down):
            part = values[top : top + down, left : left + across]
            found[top : top + down] += part @ columns[left : left + across]
    return found


def _scattered(
    read: Read,
    intervals: Sequence[tuple[int, int]],
    leading: _Leading,
    columns: Numbers,
    size: tuple[int, int],
) -> Numbers:
    total = np.zeros(size)
    indices = np.concatenate([np.arange(start, stop) for start, stop in intervals])
    for start in range(0, len(indices), _MOST_ROWS):
        row, column = np.divmod(indices[start : start + _MOST_ROWS], len(columns))
        values = read(start, start + len(row)).astype("f8")
        total += (leading.signs(row, size[0]) * values[:, None]).T @ columns[column]
    return total


def _of_finite(read: Read, sketch: Callable[[Read], Numbers]) -> Numbers:
    """Return the sketch; where elements that aren't finite spoil it, that of the others."""
    with np.errstate(all="ignore"):
        found = sketch(read)
        if np.isfinite(found).all():
            return found
        return sketch(lambda start, stop: _finite(read(start, stop)))


def _finite(values: NDArray[np.generic]) -> Numbers:
    wide = values.astype("f8")
    return np.where(np.isfinite(wide), wide, 0.0)
