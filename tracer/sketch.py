"""Numbers that compare tensors which were never stored: linear, and the same however a tensor is cut.

A sketch of size K1 x K2 is Y[t1, t2] = Σ R[t1, leading indices] · C[t2, last index] · x over the elements of
a tensor, with signs R and C of ±1 that depend on *global* indices alone. So what ranks hold in parts, and
partial sums, add up to the sketch of the whole; and the mean of (Y_a - Y_b)² estimates ‖a - b‖². The signs
are specified in ``docs/format.md``. Of tensors in float32 and below, up to 64 neighbours are summed in
float32: products of matrices in that precision take half the time. All else is summed in float64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
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

_PRODUCT, _READ = 1 << 18, 1 << 18
"""Multiplications of one product, and elements that one read gives: few enough for the cache."""

_SUMMED = 64
"""Elements of a row that are summed in float32: their sum is off by 2^-24 of their norm or so."""

_DOWN = _PRODUCT // (_SUMMED * MOST)
"""Rows of one product of so many columns.

BLAS computes a product of _PRODUCT multiplications on the calling thread: beyond, it starts threads of its
own, whose time would be the training's.
"""

_RUNS = 16
"""Sums of so many elements that are added in float32."""

_HELD = 1 << 17
"""Signs of so many indices are held between tensors."""

_SHORT = 256
"""Intervals shorter than this on average are taken element by element."""


class _Space(threading.local):
    """Memory of a thread for the products of one read: fresh memory would cost as much as the products."""

    def __init__(self) -> None:
        self.found = np.empty(_READ, "f8")
        self._products = np.empty(_READ // _SUMMED * MOST, "f4")

    def of(self, dtype: np.dtype[np.floating], shape: tuple[int, ...]) -> NDArray[np.floating] | None:
        """Return memory for an array, None where there is none."""
        size = math.prod(shape)
        fits = dtype == self._products.dtype and size <= self._products.size
        return self._products[:size].reshape(shape) if fits else None


_space = _Space()


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


class Grid:
    """The signs of a tensor of some logical dimensions, which make the sketches of all such tensors.

    It is of no use to several threads at once.
    """

    def __init__(self, sides: Sequence[Side], size: tuple[int, int] = SIZE) -> None:
        self.size = size
        self._sides = tuple(sides)
        self._leading = tuple(side.size for side in self._sides[:-1])
        self._rows = math.prod(self._leading)
        self._width = self._sides[-1].size if sides else 1

    def product(self, read: Read) -> Numbers:
        """Return the sketch of a local tensor whose indices are all combinations of those per dimension.

        Elements that aren't finite count as 0. A tensor without dimensions is every number of its sketch.
        """
        if not self._sides:
            return np.broadcast_to(_finite(read(0, 1)), self.size).copy()
        blocks = [_Block(0, 0, self._rows, 0, self._width)]
        return _of_finite(read, lambda take: self._add(take, blocks))

    def flat(self, read: Read, intervals: Sequence[tuple[int, int]]) -> Numbers:
        """Return the sketch of a local tensor of one dimension: these intervals of the flattened tensor.

        Elements that aren't finite count as 0.
        """
        total = sum(stop - start for start, stop in intervals)
        if not self._sides or not total:
            return self.product(read) if total else np.zeros(self.size)
        if total < _SHORT * len(intervals):
            indices = np.concatenate([np.arange(start, stop) for start, stop in intervals])
            return _of_finite(read, lambda take: self._scattered(take, indices))
        blocks = list(_blocks(intervals, self._width))
        return _of_finite(read, lambda take: self._add(take, blocks))

    def _add(self, read: Read, blocks: Sequence[_Block]) -> Numbers:
        total = np.zeros(self.size)
        most = _PRODUCT // math.prod(self.size)
        for block in blocks:
            for piece in _pieces(block, _READ // MOST):
                rows, width = piece.last - piece.first, piece.right - piece.left
                values = read(piece.position, piece.position + rows * width).reshape(rows, width)
                found = self._contracted(values, piece.left)
                for top in range(0, rows, most):
                    some = found[top : top + most]
                    over = self._row_signs(slice(piece.first + top, piece.first + top + len(some)))
                    total += over.T @ some
        return total

    def _contracted(self, values: NDArray[np.generic], left: int) -> Numbers:
        """Return ``values @ C``, the columns being those from ``left`` on; the next call uses its memory."""
        rows, width = values.shape
        columns = self._column_signs(slice(left, left + width))
        found, cut = _space.found[: rows * self.size[1]].reshape(rows, -1), rows - rows % _DOWN
        if values.dtype.kind != "f" or values.itemsize > columns.itemsize:
            for top in range(0, rows, _DOWN):
                wide = values[top : top + _DOWN].astype("f8")
                found[top : top + _DOWN] = _product(wide, columns.astype("f8"))
            return found
        narrow: NDArray[np.floating] = values.astype(columns.dtype, copy=False)
        for part in (slice(0, cut), slice(cut, rows)):
            if part.start < part.stop:
                found[part] = _product(narrow[part], columns)
        return found

    def _scattered(self, read: Read, indices: NDArray[np.intp]) -> Numbers:
        total = np.zeros(self.size)
        most = _PRODUCT // math.prod(self.size)
        for start in range(0, len(indices), most):
            row, column = np.divmod(indices[start : start + most], self._width)
            values = read(start, start + len(row)).astype("f8")
            total += (self._row_signs(row) * values[:, None]).T @ self._column_signs(column)
        return total

    def _row_signs(self, at: slice | NDArray[np.intp]) -> Numbers:
        """Return R's signs, [indices, K1], of flattened leading indices; 0 for padding."""
        if self._rows <= _HELD:
            return self._signs_held[0][at].astype("f8")
        return self._make_rows(np.arange(at.start, at.stop) if isinstance(at, slice) else at)

    def _column_signs(self, at: slice | NDArray[np.intp]) -> NDArray[np.float32]:
        """Return C's signs, [indices, K2] in float32, of indices along the last dimension; 0 for padding."""
        if self._width <= _HELD:
            return self._signs_held[1][at].astype("f4")
        return self._make_columns(np.arange(at.start, at.stop) if isinstance(at, slice) else at)

    @cached_property
    def _signs_held(self) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """What is held of rows and columns: all, or none of too many."""
        return (
            _gathered(self._make_rows, self._rows if self._rows <= _HELD else 0, self.size[0]),
            _gathered(self._make_columns, self._width if self._width <= _HELD else 0, self.size[1]),
        )

    def _make_rows(self, indices: NDArray[np.intp]) -> Numbers:
        bits, real = np.zeros(len(indices), np.uint64), np.ones(len(indices), bool)
        parts = np.unravel_index(indices, self._leading) if self._leading else ()
        for side, index in zip(self._sides, parts, strict=False):
            taken, inside = _words_at(side, index)
            bits ^= taken
            real &= inside
        return _signs(bits, self.size[0], shift=0) * real[:, None]

    def _make_columns(self, indices: NDArray[np.intp]) -> NDArray[np.float32]:
        bits, real = _words_at(self._sides[-1], indices)
        return (_signs(bits, self.size[1], shift=_SHIFT) * real[:, None]).astype("f4")


def sketch_product(read: Read, sides: Sequence[Side], size: tuple[int, int] = SIZE) -> Numbers:
    """Return the sketch of one local tensor, as ``Grid.product`` does."""
    return Grid(sides, size).product(read)


def sketch_flat(
    read: Read, sides: Sequence[Side], intervals: Sequence[tuple[int, int]], size: tuple[int, int] = SIZE
) -> Numbers:
    """Return the sketch of one local tensor of one dimension, as ``Grid.flat`` does."""
    return Grid(sides, size).flat(read, intervals)


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


def _gathered(
    make: Callable[[NDArray[np.intp]], NDArray[np.floating]], total: int, count: int
) -> NDArray[np.int8]:
    found = np.empty((total, count), "i1")
    for start in range(0, total, _READ // MOST):
        stop = min(start + _READ // MOST, total)
        found[start:stop] = make(np.arange(start, stop))
    return found


def _product(values: NDArray[np.floating], columns: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return ``values @ columns``, ``_DOWN`` rows at a time, or all of fewer."""
    rows, width = values.shape
    down, count, whole = min(rows, _DOWN), columns.shape[1], width - width % _SUMMED
    found: NDArray[np.floating]
    last = np.zeros((rows, 0 if whole else count), columns.dtype)
    if whole < width:
        rest = values[:, whole:].reshape(-1, down, width - whole)
        last = np.matmul(rest, columns[whole:]).reshape(rows, count)
    if not whole:
        return last
    runs = whole // _SUMMED
    pieces = values[:, :whole].reshape(rows // down, down, runs, _SUMMED).transpose(0, 2, 1, 3)
    space = _space.of(values.dtype, (rows // down, runs, down, count))
    each = np.matmul(pieces, columns[:whole].reshape(runs, _SUMMED, count), out=space)
    found = np.add.reduce(each, axis=1, dtype=values.dtype if runs <= _RUNS else np.float64)
    found = found.reshape(rows, count)
    return found + last if last.size else found


def _words_at(side: Side, indices: NDArray[np.intp]) -> tuple[Words, NDArray[np.bool_]]:
    """Return the words of some indices, and which are no padding."""
    inside = indices < len(side.words)
    if inside.all():
        return side.words[indices], inside
    return np.where(inside, np.resize(side.words, side.size)[indices], np.uint64(0)), inside


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


def _pieces(block: _Block, most_rows: int) -> Iterator[_Block]:
    """Yield parts of a block, each consecutive in the local tensor and small enough for one read."""
    width = block.right - block.left
    if width > _READ:
        for row in range(block.first, block.last):
            for left in range(0, width, _READ):
                right = min(left + _READ, width)
                position = block.position + (row - block.first) * width + left
                yield _Block(position, row, row + 1, block.left + left, block.left + right)
        return
    step = max(1, min(most_rows, _READ // max(width, 1)))
    for row in range(block.first, block.last if width else block.first, step):
        position = block.position + (row - block.first) * width
        yield _Block(position, row, min(row + step, block.last), block.left, block.right)


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
