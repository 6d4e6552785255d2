"""What ``compare``, ``tolerance`` and ``coherence`` measure, to six digits in one pass of float32.

Most boundaries are far inside of what is allowed: there six digits suffice, and speed counts. Blocks stay in
the processor's cache, sums over a few thousand elements are float32 and everything above float64. Whoever
judges asks the exact functions again where the outcome is not far inside. What cannot be measured so (other
dtypes, infinities, numbers that float32 cannot square) is answered by None.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.causality import Node
from tensortrace.diff.coherence import FEW, MOST, NONE, SAMPLED, Coherence, clusters, rounding_alike
from tensortrace.diff.compare import SEEN_FIRST, Sides
from tensortrace.diff.floors import Floor
from tensortrace.diff.inherit import Known
from tensortrace.diff.result import Metrics
from tensortrace.diff.stream import Streamed
from tensortrace.diff.tolerance import Measured, judge_model

FAR_INSIDE = 0.5
"""The ratio of error to what is allowed up to which six digits suffice."""

_ELEMENTS = 1 << 16
_LEAST_ELEMENTS = 1 << 12
_NARROWEST, _WIDEST = 16, 1 << 18
_SMALL, _LARGE = 2.0**-80, 2.0**80
_PLAIN = 2.0**-8, 2.0**8
_SAME_NORM = 1e-6
_SIGN_AND_EXPONENT = np.uint32(0xFF800000)


class Quick(NamedTuple):
    """What is measured of two tensors that are finite; extremes are left out of ``metrics``."""

    metrics: Metrics
    peak: float
    coherence: Coherence | None


class Given(NamedTuple):
    """What a comparison is judged with: the spacing of its operation and of its values, its allowances.

    ``norm`` is that of a as far as its statistics tell: where they are right it is gone through once.
    """

    eps: float
    spacing: float
    terms: float
    noise: float
    floor: Floor | None
    norm: float | None = None


def far_inside(node: Node, loaded: Assembled | Streamed, known: Known, given: Given) -> Measured | None:
    """Return quick measurements of a boundary where they tell that it is far inside of what is allowed."""
    if isinstance(loaded, Assembled) and is_one(loaded.a, loaded.b):
        return None  # nothing differs
    eps, spacing, terms, noise, floor, norm = given
    quick = measure_quickly(loaded.shape, loaded.blocks, eps=eps, spacing=spacing, terms=terms, norm=norm)
    if quick is None or quick.metrics.equal:
        return None
    measured = Measured(quick.metrics, quick.peak, terms, known.length(node), quick.coherence)
    known.note_shape(node, loaded.shape, quick.metrics.norm_a or 0.0, lookup=False)
    agreeing = [e for e in known.inherits(node, measured.size) if not e.diverges]
    judgement = judge_model(measured, eps, agreeing, noise=noise, floor=floor)
    return measured if judgement.ratio <= FAR_INSIDE else None


def measure_quickly(
    shape: tuple[int, ...], blocks: Callable[[], Iterable[Sides]], *, eps: float, spacing: float,
    terms: float, norm: float | None = None,
) -> Quick | None:  # fmt: skip
    """Return what ``measure_blocks``, ``measure_peak`` and ``measure_coherence`` would, or None.

    ``blocks`` gives both sides in row-major order and is called once where ``norm``, that of a, is known,
    else twice. ``spacing`` is the greatest of both sides' dtypes, ``terms`` the norm of the terms summed. Of
    tensors that are equal in every element it is said that they are.
    """
    size, width = math.prod(shape), shape[-1] if shape else 1
    if size < _LEAST_ELEMENTS or not eps or (len(shape) > 1 and not _NARROWEST <= width <= _WIDEST):
        return None
    with np.errstate(all="ignore"):
        if norm is not None and (typical := _typical(norm**2, size)):
            meter = _metered(shape, blocks, typical, terms)
            if meter is None:
                return None
            if math.isclose(meter.norm, norm, rel_tol=_SAME_NORM):
                return meter.result(spacing)
        squares = _squares(shape, blocks)
        typical = _typical(squares, size) if squares is not None else 0.0
        meter = _metered(shape, blocks, typical, terms) if typical else None
        return meter.result(spacing) if meter is not None else None


def _typical(squares: float, size: int) -> float:
    """Return the size of a typical element; 0 where float32 cannot square it."""
    found = math.sqrt(squares / size) if math.isfinite(squares) else 0.0
    return found if _SMALL < found < _LARGE else 0.0


def _squares(shape: tuple[int, ...], blocks: Callable[[], Iterable[Sides]]) -> float | None:
    """Return the sum of the squares of a; None where blocks are not whole rows of plain numbers."""
    squares = 0.0
    for a, b in blocks():
        if not _are_plain(a, b, shape):
            return None
        squares += sum(float(x @ x) for x in _pieces(a.reshape(-1), _ELEMENTS))
    return squares


def _metered(
    shape: tuple[int, ...], blocks: Callable[[], Iterable[Sides]], typical: float, terms: float
) -> _Meter | None:
    """Return what is summed over all blocks; None where they are not whole rows of plain numbers."""
    meter = _Meter(shape, typical, max(typical, terms / math.sqrt(math.prod(shape))))
    for a, b in blocks():
        if not _are_plain(a, b, shape):
            return None
        meter.add_block(a.reshape(-1), b.reshape(-1))
    return meter


def _are_plain(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> bool:
    return _is_plain(a) and _is_plain(b) and (len(shape) < 2 or a.size % shape[-1] == 0)


def is_one(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether both sides are the same memory: they were read once, since their digests are equal."""
    if a is b:
        return True
    if type(a) is not np.ndarray or type(b) is not np.ndarray or a.dtype != b.dtype or not a.size:
        return False
    return a.ctypes.data == b.ctypes.data and a.shape == b.shape and a.strides == b.strides


def _is_plain(array: np.ndarray) -> bool:
    return type(array) is np.ndarray and array.dtype.char in "fd" and array.flags.c_contiguous


def _pieces(flat: np.ndarray, most: int) -> Iterator[np.ndarray]:
    return (flat[start : start + most] for start in range(0, flat.size, most))


class _Scratch(threading.local):
    """Arrays that are used again for every piece: fresh ones cost more than the arithmetic."""

    def __init__(self) -> None:
        self._floats = np.empty(6 * _WIDEST, np.float32)
        self._count = 0
        self._views: tuple[np.ndarray, ...] = ()
        self.wide = np.empty(_WIDEST)
        self.ones = np.ones(_WIDEST, np.float32)

    def views(self, count: int) -> tuple[np.ndarray, ...]:
        """Return arrays of so many elements; the first has twice as many: the next two are its halves."""
        if count != self._count:
            parts = [self._floats[count * n : count * (n + 1)] for n in range(6)]
            self._count, self._views = count, (self._floats[: 2 * count], *parts)
        return self._views


_scratch = _Scratch()


class _Meter:
    """Sums over pieces of whole rows: x is a, d is b − a, q = x·d, s = x²; all scaled by a power of two.

    ``worst`` is the greatest d² / max(s, least), where ``least`` is the square of what an element is held
    against at least: the greater of a typical one and of the terms summed.
    """

    def __init__(self, shape: tuple[int, ...], typical: float, greatest: float) -> None:
        self.shape, self.size = shape, math.prod(shape)
        self.width = shape[-1] if len(shape) > 1 else 1
        self.scale = 1.0 if _PLAIN[0] < typical < _PLAIN[1] else 2.0 ** -round(math.log2(typical))
        self.least = np.float32((greatest * self.scale) ** 2)
        self.seen = 0
        self.s = self.q = self.dd = self.qq = self.qs = self.ss = self.half = self.worst = 0.0
        self.distinct, self.alike = 0, True
        rows = self.size // self.width if len(shape) > 1 else 0
        self.of_rows = np.empty((2, rows))
        self.of_columns = np.zeros((2, self.width if rows else 0))

    def add_block(self, x: np.ndarray, y: np.ndarray) -> None:
        """Take in the next elements, which are whole rows."""
        if not self.seen:
            first = x[:SEEN_FIRST]
            self.distinct = int(np.unique(np.abs(first[:: max(first.size // SAMPLED, 1)])).size)
        step = max(_ELEMENTS // self.width, 1) * self.width
        for start in range(0, x.size, step):
            self._add(x[start : start + step], y[start : start + step])

    def _add(self, x: np.ndarray, y: np.ndarray) -> None:
        both, q, s, d, f, e, scaled = _scratch.views(x.size)
        given = x, y
        if x.dtype == y.dtype == np.float32:
            np.subtract(y, x, out=d)
        else:  # rounded only once it is subtracted
            wide = _scratch.wide[: x.size]
            np.copyto(wide, y)
            np.subtract(wide, x, out=wide)
            np.copyto(d, wide, casting="same_kind")
            np.copyto(scaled, x, casting="same_kind")
            x = scaled
        if self.scale != 1.0:
            d *= np.float32(self.scale)
            x = np.multiply(x, np.float32(self.scale), out=scaled)
        np.multiply(x, d, out=q)
        np.multiply(x, x, out=s)
        self._add_sums(both, q, s)
        dd = float(d @ d)
        self.alike = self.alike and not dd and bool((given[0] == given[1]).all())
        self.dd += dd
        self.qq += float(q @ q)
        self.qs += float(q @ s)
        self.ss += float(s @ s)
        np.bitwise_and(x.view(np.uint32), _SIGN_AND_EXPONENT, out=e.view(np.uint32))
        self.half += float(x @ e)
        np.multiply(d, d, out=f)
        np.maximum(s, self.least, out=e)
        self.worst = max(self.worst, float(np.divide(f, e, out=e).max()))  # of NaN the sums tell
        self.seen += x.size

    def _add_sums(self, both: np.ndarray, q: np.ndarray, s: np.ndarray) -> None:
        """Sum within rows and within columns; q and s are the halves of ``both``."""
        ones = _scratch.ones
        if not self.of_rows.size:
            self.q += float(q @ ones[: q.size])
            self.s += float(s @ ones[: s.size])
            return
        first, rows = self.seen // self.width, q.size // self.width
        of_rows = both.reshape(2 * rows, self.width) @ ones[: self.width]
        self.of_rows[:, first : first + rows] = of_rows.reshape(2, rows)
        for number, values in enumerate((q, s)):
            self.of_columns[number] += ones[:rows] @ values.reshape(rows, self.width)

    @property
    def norm(self) -> float:
        """The norm of a."""
        squares = float(self.of_rows[1].sum()) if self.of_rows.size else self.s
        return math.sqrt(squares) / self.scale

    def result(self, spacing: float) -> Quick | None:
        """Return what was measured; None where something is not finite, or differs by nothing to speak of."""
        if self.of_rows.size:
            self.q, self.s = (float(total) for total in self.of_rows.sum(axis=1))
        norm = math.sqrt(self.s) / self.scale
        if self.alike and math.isfinite(norm):
            metrics = Metrics(
                elements=self.size, equal=True, rel_l2=0.0, abs_l2=0.0, norm_a=norm, norm_b=norm, max_abs=0.0
            )
            return Quick(metrics, 0.0, NONE)
        sums = (self.s, self.q, self.dd, self.qq, self.qs, self.ss, self.half, self.worst)
        if not all(map(math.isfinite, sums)) or not self.dd or not self.s or not self.worst:
            return None
        least = 1e-30 * self.seen
        if self.dd < least or self.qq < least:  # squares that float32 rounds to nothing
            return None
        unit = 1 / self.scale
        offset = self.q / self.s
        single = max(self.qq - 2 * offset * self.qs + offset**2 * self.ss, 0.0)
        norm, error = math.sqrt(self.s), math.sqrt(self.dd)
        of_b = max(self.s + 2 * self.q + self.dd, 0.0)
        metrics = Metrics(
            elements=self.size, equal=False, rel_l2=error / norm, abs_l2=error * unit, norm_a=norm * unit,
            norm_b=math.sqrt(of_b) * unit, projection=1 + offset,
            projection_error=math.sqrt(single) / self.s,
        )  # fmt: skip
        return Quick(metrics, math.sqrt(self.worst), self._coherence(offset, single, spacing))

    def _coherence(self, offset: float, single: float, spacing: float) -> Coherence | None:
        if self.distinct < FEW:
            return None
        spread = math.sqrt(single)
        for name, count, stride in clusters(self.shape):
            q, s = self.of_columns if name == "columns" else self.of_rows
            if name == "outer":
                q, s = (v.reshape(count, stride // self.width).sum(axis=1) for v in (q, s))
            products = q - offset * s
            if count > MOST:
                products = np.add.reduceat(products, np.arange(0, count, -(-count // MOST)))
            kept = min(count, MOST)  # of clusters, those that joining leaves empty included
            spread = max(spread, float(np.linalg.norm(products)) * (1 + 8 / kept))
        half = 0.5 * spacing * self.half
        return Coherence(spread / self.s, half / self.s * (1 + rounding_alike(self.distinct)))
