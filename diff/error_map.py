"""Where in a tensor two runs differ: a grid of blocks, the borders of ranks' parts, histograms.

Everything is summed over chunks of bounded size, so that memory does not grow with the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from msgspec import Struct

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.compare import flat_chunks
from tensortrace.diff.logical import Merged
from tensortrace.diff.stream import Streamed
from tensortrace.tracer.geometry import Intervals, Region

ROWS, COLUMNS = 40, 64
"""Most blocks of a grid; a smaller tensor has a block for each element."""

MOST_PARTS = 64
"""Parts of ranks beyond which no borders are drawn."""

SIZES = tuple(range(-12, 3))
"""Decades of |a−b| over the root mean square of a: what is smaller or larger counts in the first or last."""

ULPS = 26
"""Classes of differences in units of the last place: below 1, then from 2^n on."""


class Part(Struct, frozen=True):
    """What a rank holds: rows and columns [start, stop) of the tensor seen as a matrix."""

    label: str
    rows: tuple[int, int]
    columns: tuple[int, int]


class ErrorMap(Struct, frozen=True, kw_only=True):
    """A tensor of ``shape`` as a matrix of ``rows`` × ``columns``: its first ``split`` dimensions are rows.

    ``blocks`` are the root mean square of the difference in each block of the grid, row by row, over the root
    mean square of the whole of a; infinite where one run alone is not finite. ``zero`` counts equal elements,
    ``sizes`` and ``ulps`` the others by how large the difference is.
    """

    shape: tuple[int, ...]
    split: int
    rows: int
    columns: int
    grid: tuple[int, int]
    blocks: tuple[float, ...]
    parts: tuple[Part, ...]
    side: str
    zero: int
    broken: int
    sizes: tuple[int, ...]
    ulps: tuple[int, ...]


class _Matrix(NamedTuple):
    rows: int
    columns: int
    split: int


def error_map(
    loaded: Assembled | Streamed, items_a: Sequence[Item], items_b: Sequence[Item], eps: float
) -> ErrorMap | None:
    """Return where both sides differ, None for one number; ``eps`` is the spacing of the coarser dtype."""
    shape = loaded.shape
    if math.prod(shape) < 2:
        return None
    matrix = _matrix(shape)
    grid = min(matrix.rows, ROWS), min(matrix.columns, COLUMNS)
    sums = _sums(loaded, matrix, grid, eps)
    side, parts = _parts(loaded, items_a, items_b, matrix)
    return ErrorMap(
        shape=shape, split=matrix.split, rows=matrix.rows, columns=matrix.columns, grid=grid,
        blocks=tuple(map(float, sums.blocks())), parts=parts, side=side, zero=sums.zero, broken=sums.bad,
        sizes=tuple(map(int, sums.sizes)), ulps=tuple(map(int, sums.ulps)),
    )  # fmt: skip


def _matrix(shape: tuple[int, ...]) -> _Matrix:
    """See a tensor as a matrix that is as square as its dimensions allow."""
    if len(shape) == 1:
        return _Matrix(1, shape[0], 0)

    def elongation(split: int) -> float:
        return abs(math.log(math.prod(shape[:split])) - math.log(math.prod(shape[split:])))

    split = min(range(1, len(shape)), key=elongation)
    return _Matrix(math.prod(shape[:split]), math.prod(shape[split:]), split)


class _Sums:
    """Squares per block and counts per class of size, of one tensor."""

    def __init__(self, matrix: _Matrix, grid: tuple[int, int], scale: float, eps: float) -> None:
        self._matrix, self._grid, self._scale, self._eps = matrix, grid, scale, eps
        self._squares = np.zeros(grid[0] * grid[1])
        self._counts = np.zeros(grid[0] * grid[1])
        self.sizes = np.zeros(len(SIZES), np.int64)
        self.ulps = np.zeros(ULPS, np.int64)
        self.zero = self.bad = 0

    def add(self, start: int, x: np.ndarray, y: np.ndarray) -> None:
        """Take in elements of the flattened tensor from ``start`` on."""
        delta, bad = _difference(x, y)
        self.bad += int(np.count_nonzero(bad))
        self._add_blocks(np.arange(start, start + x.size), np.where(bad, np.inf, delta * delta))
        differs = (delta > 0) & ~bad
        self.zero += int(x.size - np.count_nonzero(differs) - np.count_nonzero(bad))
        delta, x = delta[differs], np.abs(x[differs])
        if delta.size:
            decade = np.floor(np.log10(delta / self._scale)).astype(np.int64)
            _count(self.sizes, decade - SIZES[0])
            spacing = self._eps * np.exp2(np.floor(np.log2(np.maximum(x, _TINY))))
            _count(self.ulps, np.floor(np.log2(np.maximum(delta / spacing, 0.5))).astype(np.int64) + 1)

    def _add_blocks(self, at: np.ndarray, squares: np.ndarray) -> None:
        rows = at // self._matrix.columns * self._grid[0] // self._matrix.rows
        columns = at % self._matrix.columns * self._grid[1] // self._matrix.columns
        blocks = rows * self._grid[1] + columns
        self._squares += np.bincount(blocks, squares, minlength=self._squares.size)
        self._counts += np.bincount(blocks, minlength=self._counts.size)

    def blocks(self) -> np.ndarray:
        """Return the root mean square of the difference in each block, over the scale."""
        return np.asarray(np.sqrt(self._squares / np.maximum(self._counts, 1)) / self._scale)


_TINY = 1e-300


def _difference(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return |x−y|, 0 where both are alike, and which elements one side alone has no finite number of."""
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    bad = ~same & ~(np.isfinite(x) & np.isfinite(y))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(same | bad, 0.0, np.abs(y - x)), bad


def _count(into: np.ndarray, numbers: np.ndarray) -> None:
    into += np.bincount(np.clip(numbers, 0, into.size - 1), minlength=into.size)


def _sums(loaded: Assembled | Streamed, matrix: _Matrix, grid: tuple[int, int], eps: float) -> _Sums:
    scale = _root_mean_square(loaded) or 1.0
    sums = _Sums(matrix, grid, scale, eps or np.finfo(np.float64).eps)
    with np.errstate(over="ignore"):
        for start, x, y in _chunks(loaded):
            sums.add(start, x, y)
    return sums


def _root_mean_square(loaded: Assembled | Streamed) -> float:
    """Return that of the finite elements of a, or of b where a is all zero."""
    totals, count = np.zeros(2), 0
    for _, x, y in _chunks(loaded):
        for number, side in enumerate((x, y)):
            kept = side[np.isfinite(side)]
            totals[number] += float(kept @ kept)
        count += x.size
    with np.errstate(over="ignore"):
        a, b = (math.sqrt(total / count) if math.isfinite(total) else 0.0 for total in map(float, totals))
    return a or b


def _chunks(loaded: Assembled | Streamed) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield both sides in float64 with where they begin; of complex numbers the absolute values."""
    start = 0
    for a, b in loaded.blocks():
        sides = (np.abs(a), np.abs(b)) if a.dtype.kind == "c" or b.dtype.kind == "c" else (a, b)
        for x, y in flat_chunks(*sides):
            yield start, x, y
            start += x.size


def _parts(
    loaded: Assembled | Streamed, items_a: Sequence[Item], items_b: Sequence[Item], matrix: _Matrix
) -> tuple[str, tuple[Part, ...]]:
    """Return which rank holds what, of b, else of a; nothing where all hold all of it."""
    by_row = isinstance(loaded, Assembled) and bool(loaded.owners)
    for side, items in (("b", items_b), ("a", items_a)):
        found = _of_shards(items, loaded.shape, matrix, by_row=by_row)
        if len(found) > 1:
            return side, found
        if by_row and side == "b" and len(rows := _of_rows(cast(Assembled, loaded), matrix)) > 1:
            return side, rows
    return "", ()


def _of_rows(loaded: Assembled, matrix: _Matrix) -> tuple[Part, ...]:
    """Return runs of rows that one rank's pass gave; of a vector they are columns."""
    per = max(matrix.rows // loaded.shape[0], 1)
    keys = [(row.part.rank, row.part.number) for row in loaded.owners]
    several = len({number for _, number in keys}) > 1
    ends = np.cumsum((0, *loaded.lengths)) * per
    starts = [n for n, key in enumerate(keys) if n == 0 or key != keys[n - 1]]
    if len(starts) > MOST_PARTS or len({rank for rank, _ in keys}) < 2:
        return ()
    runs = [
        (_named(keys[n], several), (int(ends[n]), int(ends[m]))) for n, m in pairwise([*starts, len(keys)])
    ]
    if not matrix.split:
        return tuple(Part(label, (0, 1), run) for label, run in runs)
    return tuple(Part(label, run, (0, matrix.columns)) for label, run in runs)


def _named(key: tuple[int, int], several: bool) -> str:
    return f"rank {key[0]}, microbatch {key[1]}" if several else f"rank {key[0]}"


def _together(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _of_shards(
    items: Sequence[Item], shape: tuple[int, ...], matrix: _Matrix, *, by_row: bool
) -> tuple[Part, ...]:
    """Return the boxes that ranks hold, ranks of equal ones together; nothing where they are no boxes.

    ``by_row``: the first dimension is what the ranks' first ones were put together to, row by row.
    """
    held: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for item in items:
        for part in item.source.parts if isinstance(item.source, Merged) else ():
            dims = _dims(part.region, shape, by_row=by_row)
            box = None if dims is None or part.partial else _box(dims, shape, matrix, flat=part.region.flat)
            if box is None:
                return ()
            held.setdefault(box, []).append(part.rank)
    if len(held) > MOST_PARTS:
        return ()
    return tuple(Part(_together(ranks), *box) for box, ranks in sorted(held.items()))


def _dims(region: Region, shape: tuple[int, ...], *, by_row: bool) -> Sequence[Intervals] | None:
    """Return a region's intervals along the dimensions of what is compared; None where these are others."""
    if region.global_shape == shape:
        return region.dims
    last = len(shape) - 1
    first = len(region.dims) - last
    if not by_row or region.flat or first < 1 or region.global_shape[first:] != shape[1:]:
        return None
    if any(
        found != ((0, size),) for found, size in zip(region.dims[:first], region.global_shape, strict=False)
    ):
        return None  # ranks share the rows, too
    return ((0, shape[0]),), *region.dims[first:]


def _box(
    dims: Sequence[Intervals], shape: tuple[int, ...], matrix: _Matrix, *, flat: bool
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return a region's rows and columns of the matrix; None where it is no one box of it."""
    if any(len(intervals) != 1 for intervals in dims):
        return None
    intervals = [found[0] for found in dims]
    if flat:
        start, stop = intervals[0]
        if matrix.rows == 1:
            return (0, 1), (start, stop)
        return (start // matrix.columns, -(-stop // matrix.columns)), (0, matrix.columns)
    rows = _range(intervals[: matrix.split], shape[: matrix.split])
    columns = _range(intervals[matrix.split :], shape[matrix.split :])
    return (rows, columns) if rows and columns else None


def _range(intervals: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[int, int] | None:
    """Return where a box lies in dimensions laid end to end; None where it is not one range of them."""
    start, stop, open_ = 0, 1, False
    for (first, last), size in zip(intervals, sizes, strict=True):
        if open_ and (first, last) != (0, size):
            return None
        start, stop = start * size + first, (stop - 1) * size + last
        open_ = open_ or last - first > 1
    return start, stop
