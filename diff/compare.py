"""How far two global tensors are apart: metrics in float64."""

from __future__ import annotations

import math

import numpy as np

from tensortrace.diff.result import Metrics

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


def is_exact(dtype: str) -> bool:
    """Tell whether values of this dtype are compared exactly (integers, booleans)."""
    return dtype not in EPS


def measure(a: np.ndarray, b: np.ndarray, *, eps: float = EPS["float32"]) -> Metrics:
    """Return the metrics of two arrays of one shape; ``eps`` is that of the coarser dtype.

    Elements where both are NaN, or equal infinities, count as equal; every other pattern of non-finite
    values makes ``rel_l2`` infinite.
    """
    x, y = _flat(a), _flat(b)
    finite = np.isfinite(x) & np.isfinite(y)
    alike = (x == y) | (np.isnan(x) & np.isnan(y))
    broken = int(np.count_nonzero(~finite & ~alike))
    bad_a, bad_b = int(np.count_nonzero(~np.isfinite(x))), int(np.count_nonzero(~np.isfinite(y)))
    if alike.all():
        norm = float(np.linalg.norm(x[finite]))
        return Metrics(
            elements=x.size, equal=True, rel_l2=0.0, abs_l2=0.0, norm_a=norm, norm_b=norm,
            max_abs=0.0, nonfinite_a=bad_a, nonfinite_b=bad_b,
        )  # fmt: skip
    if broken:
        where = int(np.argmax(~finite & ~alike))
        return Metrics(
            elements=x.size, equal=False, rel_l2=math.inf, abs_l2=math.inf, max_abs=math.inf,
            norm_a=float(np.linalg.norm(x[np.isfinite(x)])), norm_b=float(np.linalg.norm(y[np.isfinite(y)])),
            max_abs_at=_index(where, a.shape), max_abs_a=float(x[where]), max_abs_b=float(y[where]),
            nonfinite_a=bad_a, nonfinite_b=bad_b,
        )  # fmt: skip
    return _finite_metrics(np.where(finite, x, 0.0), np.where(finite, y, 0.0), a.shape, eps, bad_a, bad_b)


def _finite_metrics(
    x: np.ndarray, y: np.ndarray, shape: tuple[int, ...], eps: float, bad_a: int, bad_b: int
) -> Metrics:
    delta = y - x
    xx, yy, xy = float(x @ x), float(y @ y), float(x @ y)
    error = float(np.linalg.norm(delta))
    worst = int(np.argmax(np.abs(delta)))
    projection, spread = _projection(x, delta, xx)
    with np.errstate(over="ignore"):  # an element that is 0 in a
        relative = np.abs(delta) / np.maximum(np.abs(x), 1e-300)
        ulp = np.abs(delta) / (eps * np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-300)))))
    steepest = int(np.argmax(relative))
    return Metrics(
        elements=x.size,
        equal=False,
        rel_l2=error / math.sqrt(xx) if xx else math.inf,
        abs_l2=error,
        norm_a=math.sqrt(xx),
        norm_b=math.sqrt(yy),
        projection=projection,
        projection_error=spread,
        cosine=xy / math.sqrt(xx * yy) if xx and yy else None,
        max_abs=float(abs(delta[worst])),
        max_abs_at=_index(worst, shape),
        max_abs_a=float(x[worst]),
        max_abs_b=float(y[worst]),
        max_ulp=float(ulp.max()),
        max_rel=float(relative[steepest]) if x[steepest] else None,
        max_rel_at=_index(steepest, shape),
        nonfinite_a=bad_a,
        nonfinite_b=bad_b,
    )


def _projection(x: np.ndarray, delta: np.ndarray, xx: float) -> tuple[float | None, float | None]:
    """Return ⟨a,b⟩/⟨a,a⟩ and its standard error from the residual's scatter."""
    if not xx:
        return None, None
    offset = float(x @ delta) / xx
    residual = delta - offset * x
    # Var(⟨x,r⟩) = Σ x²r² for independent residuals of unequal size
    spread = math.sqrt(float((x * x) @ (residual * residual))) / xx
    return 1.0 + offset, spread


def _flat(values: np.ndarray) -> np.ndarray:
    """Return the elements as float64, complex numbers as pairs."""
    flat = np.ravel(values)
    if flat.dtype.kind == "c":
        flat = np.ascontiguousarray(flat).view(flat.real.dtype)
    return flat.astype(np.float64, copy=False)


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    size = math.prod(shape)
    if not shape or flat >= size:  # a pair of a complex number
        return ()
    return tuple(int(n) for n in np.unravel_index(flat, shape))
