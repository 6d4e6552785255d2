"""What is kept of a tensor beside its bytes: its digest and its statistics."""

from __future__ import annotations

import math
import threading

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, values
from tensortrace.tracer.types import Stats

_BLOCK = 128 << 10
"""Elements that are looked at together: few enough for the cache."""

_EXACT = 4 << 10
"""Elements up to which all is summed in float64; of more in float32, as ``docs/format.md`` allows."""

_RUN = 1024
"""Squares that are added up in float32: in whatever order, their sum is right to 2^-14 of itself."""

_COLUMN = 64
"""Numbers that are added up in float32: in any order, their sum is right to 2^-18 of their magnitudes'."""

_VANISHING = 2.0**-100
"""Mean square of a run below which float32 may have lost some of the squares."""

_DOT = 8 << 10
"""Elements of one inner product. Beyond 10,000 BLAS hands it to threads of its own, which then spin on the
cores that train."""


class _Space(threading.local):
    """Memory of a thread for a block in float64: fresh memory would cost more than the block's statistics."""

    def __init__(self) -> None:
        self.wide = np.empty(_BLOCK, "f8")


_space = _Space()


def digest(dtype: str, shape: tuple[int, ...], data: Bytes) -> str:
    """Return the digest of a tensor: xxh3-128 in hex, see ``docs/format.md``.

    ``data`` are the logical bytes: little-endian elements in row-major order.
    """
    hasher = digest_of(dtype, shape)
    hasher.update(data.data)
    return hasher.hexdigest()


def digest_of(dtype: str, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    """Return the digest before any logical byte; ``update`` it with them in order."""
    return xxhash.xxh3_128(f"{dtype}[{','.join(map(str, shape))}]\0".encode("ascii"))


def statistics(dtype: str, data: Bytes) -> Stats:
    """Return the statistics of a tensor over its finite elements, accumulated in float64 by blocks.

    Booleans count as 0 and 1. A complex element is finite if both parts are, and has no minimum, maximum
    or mean. A statistic that float64 cannot represent is None.
    """
    kind = dtype_of(dtype)
    total = _Running()
    step = _BLOCK * kind.itemsize
    with np.errstate(all="ignore"):  # signalling NaNs, sums and squares that overflow
        if kind.family == "float" and data.size == kind.itemsize:  # as many are: counts, rates, losses
            one = float(values(dtype, data)[0])
            if math.isfinite(one):
                return Stats(finite=1, minimum=one, maximum=one, mean=one, l2=abs(one))
        for start in range(0, data.size, step):
            chunk = values(dtype, data[start : start + step])
            if kind.family == "complex":
                total.add_complex(chunk)
            elif chunk.dtype != np.float32 or data.size <= 4 * _EXACT or not total.add_quickly(chunk):
                total.add(chunk)
    return total.result()


class _Running:
    """Sums over the chunks of one tensor."""

    def __init__(self) -> None:
        self.finite = self.nan = self.inf = 0
        self.low, self.high = math.inf, -math.inf
        self.sum = 0.0
        self.l2 = 0.0
        self.ordered = True

    def add(self, chunk: NDArray[np.generic]) -> None:
        """Take in a chunk of at most ``_BLOCK`` real numbers or booleans."""
        wide = _space.wide[: chunk.size]
        np.copyto(wide, chunk)
        ends = chunk if chunk.dtype.kind == "f" and chunk.itemsize > 2 else wide  # the faster of the two
        low, high = float(np.minimum.reduce(ends)), float(np.maximum.reduce(ends))
        if not (math.isfinite(low) and math.isfinite(high)):
            wide = wide[self._count_nonfinite(np.isnan(wide), np.isinf(wide))]
            if wide.size:
                low, high = float(wide.min()), float(wide.max())
        self.finite += wide.size
        if wide.size:
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.sum += float(np.add.reduce(wide))
            self.l2 = math.hypot(self.l2, _norm(wide))

    def add_quickly(self, chunk: NDArray[np.generic]) -> bool:
        """Take in a chunk by sums in float32; False where these would not tell, or not exactly enough."""
        square = _squares_quickly(chunk)
        total = _sum_quickly(chunk)
        if not (math.isfinite(square) and math.isfinite(total)):
            return False  # something isn't finite, or overflows
        low, high = float(np.minimum.reduce(chunk)), float(np.maximum.reduce(chunk))
        if square < _VANISHING * chunk.size and (low or high):
            return False
        self.finite += chunk.size
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.sum += total
        self.l2 = math.hypot(self.l2, math.sqrt(square))
        return True

    def add_complex(self, chunk: NDArray[np.generic]) -> None:
        """Take in a chunk of complex numbers."""
        self.ordered = False
        wide = chunk.astype("c16")
        nan = np.isnan(wide)
        wide = wide[self._count_nonfinite(nan, np.isinf(wide) & ~nan)]
        self.finite += wide.size
        self.l2 = math.hypot(self.l2, _norm(wide.view("f8")))

    def _count_nonfinite(self, nan: NDArray[np.bool_], inf: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Count the elements that aren't finite and return the mask of those that are."""
        self.nan += int(nan.sum())
        self.inf += int(inf.sum())
        return np.logical_not(nan | inf)

    def result(self) -> Stats:
        """Return the statistics of all chunks taken in."""
        if not self.finite:
            return Stats(finite=0, nan=self.nan, inf=self.inf)
        ordered = self.ordered
        return Stats(
            finite=self.finite,
            nan=self.nan,
            inf=self.inf,
            minimum=self.low if ordered else None,
            maximum=self.high if ordered else None,
            mean=_representable(self.sum / self.finite) if ordered else None,
            l2=_representable(self.l2),
        )


def _norm(wide: NDArray[np.float64]) -> float:
    """Return the L2 norm; scaled where the squares would overflow or vanish."""
    square = _squares(wide)
    if 1e-280 < square < math.inf:
        return math.sqrt(square)
    top = float(np.abs(wide).max(initial=0.0))
    if top == 0.0:
        return 0.0
    scaled = wide / top
    return top * math.sqrt(_squares(scaled))


def _squares_quickly(chunk: NDArray[np.generic]) -> float:
    whole = chunk.size // _RUN * _RUN
    rest = chunk[whole:]
    rows = chunk[:whole].reshape(-1, _RUN)
    each = np.matmul(rows[:, None], rows[:, :, None])  # an inner product of each row
    return float(np.add.reduce(each, axis=None, dtype="f8")) + float(np.dot(rest, rest))


def _sum_quickly(chunk: NDArray[np.generic]) -> float:
    whole = chunk.size // _COLUMN * _COLUMN
    columns = np.add.reduce(chunk[:whole].reshape(_COLUMN, -1), axis=0)
    return float(np.add.reduce(columns, dtype="f8")) + float(np.add.reduce(chunk[whole:], dtype="f8"))


def _squares(wide: NDArray[np.float64]) -> float:
    whole = wide.size // _DOT * _DOT
    rest = wide[whole:]
    total = float(np.dot(rest, rest))
    if whole:
        rows = wide[:whole].reshape(-1, _DOT)
        total += float(np.matmul(rows[:, None], rows[:, :, None]).sum())  # an inner product of each row
    return total


def _representable(number: float) -> float | None:
    return number if math.isfinite(number) else None
