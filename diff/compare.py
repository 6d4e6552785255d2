"""How far two global tensors are apart: metrics in float64, accumulated block by block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from tensortrace.diff.result import Judgement, Metrics

EPS: dict[str, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
"""Spacing of 1.0 in each inexact dtype."""

Sides = tuple[np.ndarray, np.ndarray]
"""The same elements of two tensors."""

_CHUNK = SEEN_FIRST = 1 << 18
_CACHED = 1 << 16  # elements that stay in the cache in float64
_TINY = 1e-300


def is_exact(dtype: str) -> bool:
    """Tell whether values of this dtype are compared exactly (integers, booleans)."""
    return dtype not in EPS


def measure(a: np.ndarray, b: np.ndarray, *, eps: float = EPS["float32"]) -> Metrics:
    """Return the metrics of two arrays of one shape; ``eps`` is that of the coarser dtype."""
    return measure_blocks(a.shape, [(a, b)], eps=eps)


def measure_blocks(
    shape: tuple[int, ...], blocks: Iterable[Sides], *, eps: float = EPS["float32"]
) -> Metrics:
    """Return the metrics of two tensors of one shape, given in blocks in row-major order.

    Elements where both are NaN, or equal infinities, count as equal; every other pattern of non-finite
    values makes ``rel_l2`` infinite. Complex numbers count as pairs.
    """
    meter = _Meter(eps)
    paired = False
    with np.errstate(over="ignore", invalid="ignore"):  # an element that is 0 in a, squares of huge ones
        for a, b in blocks:
            paired = paired or a.dtype.kind == "c"
            for x, y in flat_chunks(a, b):
                meter.add(x, y)
    return meter.result(shape, 2 if paired else 1)


def flat_chunks(a: np.ndarray, b: np.ndarray) -> Iterator[Sides]:
    """Yield the elements of two arrays as float64, a bounded number at a time; complex ones as pairs."""
    left, right = _flat(a), _flat(b)
    for start in range(0, left.size, _CHUNK):
        piece = slice(start, start + _CHUNK)
        yield left[piece].astype(np.float64, copy=False), right[piece].astype(np.float64, copy=False)


def summed_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of b - a summed over all dimensions but the last; 0 where it isn't finite."""
    if not b.ndim or not b.size:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    left, right = (values.reshape(-1, b.shape[-1]) for values in (a, b))
    many = max(_CACHED // b.shape[-1], 1)
    total = np.zeros(b.shape[-1], wide)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(right), many):
            error = right[start : start + many].astype(wide) - left[start : start + many]
            total += np.ones(len(error)) @ error
        norm = float(np.linalg.norm(total))
    return norm if math.isfinite(norm) else 0.0


class _Meter:
    """Sums and extremes over the chunks of two tensors.

    ``cubes`` and ``fourths`` are Σx³r and Σx⁴, ``scatter`` Σx²r², where r is what a first guess of the common
    factor leaves of the difference: from them the scatter around the final factor follows without loss.
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.count = self.bad_a = self.bad_b = 0
        self.xx = self.yy = self.xy = self.x_delta = self.delta2 = 0.0
        self.scatter = self.cubes = self.fourths = self.fourths_equal = 0.0
        self.guess: float | None = None
        self.alike = True
        self.broken: tuple[int, float, float] | None = None
        self.worst = (-1.0, 0, 0.0, 0.0)  # |delta|, position, values in a and b
        self.steepest: tuple[float, int, float] = (-1.0, 0, 0.0)  # relative, position, value in a
        self.ulp = 0.0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Take in the next elements."""
        start = self.count
        self.count += x.size
        same = x == y
        if not same.all() or not math.isfinite(float(x.sum())):
            x, y, same = self._without_nonfinite(x, y, same, start)
        xx = float(x @ x)
        self.xx += xx
        if same.all():
            self.yy += xx
            self.xy += xx
            square = x * x
            self.fourths_equal += float(square @ square)
            return
        self.alike = False
        self._add_difference(x, y, xx, start)

    def _without_nonfinite(
        self, x: np.ndarray, y: np.ndarray, same: np.ndarray, start: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count what is not finite, and set it to zero in both where it is alike, in each where not."""
        good_x, good_y = np.isfinite(x), np.isfinite(y)
        if good_x.all() and good_y.all():
            return x, y, same
        self.bad_a += int(np.count_nonzero(~good_x))
        self.bad_b += int(np.count_nonzero(~good_y))
        same |= np.isnan(x) & np.isnan(y)
        bad = ~(good_x & good_y) & ~same
        if self.broken is None and bad.any():
            first = int(np.argmax(bad))
            self.broken = (start + first, float(x[first]), float(y[first]))
        return np.where(good_x, x, 0.0), np.where(good_y, y, 0.0), same

    def _add_difference(self, x: np.ndarray, y: np.ndarray, xx: float, start: int) -> None:
        delta = y - x
        x_delta = float(x @ delta)
        self.yy += float(y @ y)
        self.xy += float(x @ y)
        self.x_delta += x_delta
        self.delta2 += float(delta @ delta)
        if self.guess is None:
            self.guess = x_delta / xx if xx else 0.0
        rest, square = delta - self.guess * x, x * x
        self.scatter += float(square @ (rest * rest))
        self.cubes += float((square * x) @ rest)
        self.fourths += float(square @ square)
        self._add_extremes(x, y, np.abs(delta), start)

    def _add_extremes(self, x: np.ndarray, y: np.ndarray, delta: np.ndarray, start: int) -> None:
        at = int(np.argmax(delta))
        if delta[at] > self.worst[0]:
            self.worst = (float(delta[at]), start + at, float(x[at]), float(y[at]))
        size = np.maximum(np.abs(x), _TINY)
        relative = delta / size
        at = int(np.argmax(relative))
        if relative[at] > self.steepest[0]:
            self.steepest = (float(relative[at]), start + at, float(x[at]))
        self.ulp = max(self.ulp, float((delta / (self.eps * np.exp2(np.floor(np.log2(size))))).max()))

    def result(self, shape: tuple[int, ...], per_element: int) -> Metrics:
        """Return the metrics of all that was taken in."""
        norm_a, norm_b = math.sqrt(self.xx), math.sqrt(self.yy)
        if self.broken is not None:
            at, value_a, value_b = self.broken
            return Metrics(
                elements=self.count, equal=False, rel_l2=math.inf, abs_l2=math.inf, max_abs=math.inf,
                norm_a=norm_a, norm_b=norm_b, max_abs_at=_index(at // per_element, shape),
                max_abs_a=value_a, max_abs_b=value_b, nonfinite_a=self.bad_a, nonfinite_b=self.bad_b,
            )  # fmt: skip
        if self.alike:
            return Metrics(
                elements=self.count, equal=True, rel_l2=0.0, abs_l2=0.0, norm_a=norm_a, norm_b=norm_a,
                max_abs=0.0, nonfinite_a=self.bad_a, nonfinite_b=self.bad_b,
            )  # fmt: skip
        projection, spread = self._projection()
        error = math.sqrt(self.delta2)
        return Metrics(
            elements=self.count,
            equal=False,
            rel_l2=error / norm_a if norm_a else math.inf,
            abs_l2=error,
            norm_a=norm_a,
            norm_b=norm_b,
            projection=projection,
            projection_error=spread,
            cosine=self.xy / math.sqrt(self.xx * self.yy) if self.xx and self.yy else None,
            max_abs=self.worst[0],
            max_abs_at=_index(self.worst[1] // per_element, shape),
            max_abs_a=self.worst[2],
            max_abs_b=self.worst[3],
            max_ulp=self.ulp,
            max_rel=self.steepest[0] if self.steepest[2] else None,
            max_rel_at=_index(self.steepest[1] // per_element, shape),
            nonfinite_a=self.bad_a,
            nonfinite_b=self.bad_b,
        )

    def _projection(self) -> tuple[float | None, float | None]:
        """Return ⟨a,b⟩/⟨a,a⟩ and its standard error from the residual's scatter."""
        if not self.xx:
            return None, None
        offset, guess = self.x_delta / self.xx, self.guess or 0.0
        # where a chunk is equal the guess alone is left of it: r = −guess·x
        scatter = self.scatter + guess**2 * self.fourths_equal
        cubes = self.cubes - guess * self.fourths_equal
        fourths = self.fourths + self.fourths_equal
        more = offset - guess
        # Var(⟨x,r⟩) = Σ x²r² for independent residuals of unequal size
        spread = max(scatter - 2 * more * cubes + more**2 * fourths, 0.0)
        return 1.0 + offset, math.sqrt(spread) / self.xx


def _flat(values: np.ndarray) -> np.ndarray:
    """Return the elements one after the other, complex numbers as pairs."""
    flat = np.ravel(values)
    if flat.dtype.kind == "c":
        flat = np.ascontiguousarray(flat).view(flat.real.dtype)
    return flat


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        return ()
    return tuple(int(n) for n in np.unravel_index(flat, shape))


def describe(metrics: Metrics, judgement: Judgement) -> str:
    """Return in one line how far two tensors are apart."""
    if metrics.elements == 1 and metrics.max_abs_a is not None:
        return f"{metrics.max_abs_b:.9g} in b, {metrics.max_abs_a:.9g} in a"
    if metrics.nonfinite_a != metrics.nonfinite_b:
        return f"{metrics.nonfinite_b} non-finite elements in b, {metrics.nonfinite_a} in a"
    said = judgement.reason.startswith("relative L2 error")
    return judgement.reason if said else f"relative L2 error {metrics.rel_l2:.3g}; {judgement.reason}"
