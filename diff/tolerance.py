"""How much two runs may legally differ at a boundary, and whether they differ by more.

The error model is absolute: round-off of the terms summed, c·eps·(magnitude of the terms), plus the
inputs' own measured error times what an operation may amplify. Three tests, each with its own limit: the
L2 error, the worst element (against the tensor's typical element, so that one wrong element among many is
seen), and the projection ⟨a,b⟩/⟨a,a⟩ (a coherent factor far below the noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensortrace.diff.compare import Sides, flat_chunks
from tensortrace.diff.result import Judgement, Metrics

OWN = 8.0
"""Units of round-off that one operation may add in L2: products, a blocked sum, a few roundings."""

PEAK = 8.0
"""The worst element may err this many times the L2 allowance: the tail of many independent roundings."""

COHERENT = 4.0
"""Units of round-off by which a correct run may be off by one common factor (order of scalings)."""

AMPLIFY = 4.0
"""An operation may amplify its inputs' relative error by this much (normalisation, softmax)."""

FLOOR_RATIO = {1: 10.0, 2: 5.0}
"""Error over floor that is still called noise, by number of floor runs; 3 for three and more."""


@dataclass(frozen=True)
class Error:
    """What a boundary's children inherit: relative L2 error, worst relative element, norm of the terms.

    ``together`` is the norm of the error summed over rows, relative to the same: no more than the L2 error
    where rows err by chance, up to √rows times that where an error of a parameter moves them all alike.
    """

    rel: float = 0.0
    peak: float = 0.0
    norm: float = 0.0
    diverges: bool = False
    together: float = 0.0

    def of_sum(self) -> Error:
        """Return what a sum over the rows inherits."""
        return replace(self, rel=max(self.rel, self.together))


@dataclass(frozen=True)
class Measured:
    """One comparison's numbers: metrics, worst relative element, and the norm of the terms summed."""

    metrics: Metrics
    peak: float
    terms: float

    @property
    def size(self) -> float:
        """The norm that errors are relative to: of the terms summed, at least of the result."""
        return max(self.metrics.norm_a or 0.0, self.terms)

    @property
    def error(self) -> float:
        """L2 error relative to ``size``."""
        absolute = self.metrics.abs_l2 or 0.0
        return absolute / self.size if self.size else math.inf if absolute else 0.0


def measure_peak(blocks: Iterable[Sides], metrics: Metrics, terms: float) -> float:
    """Return the worst |b−a| over the greater of |a| and the typical magnitude of the terms summed.

    ``blocks`` are those that ``metrics`` were measured on: a typical element's size is known only then.
    """
    if not metrics.elements:
        return 0.0
    typical = max(metrics.norm_a or 0.0, terms) / math.sqrt(metrics.elements)
    worst = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in blocks:
            for x, y in flat_chunks(a, b):
                worst = max(worst, _peak(x, y, typical))
                if worst == math.inf:
                    return worst
    return worst


def _peak(x: np.ndarray, y: np.ndarray, typical: float) -> float:
    delta = np.abs(y - x)
    delta[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    if not math.isfinite(float(np.max(delta))):
        return math.inf
    scale = np.maximum(np.where(np.isfinite(x), np.abs(x), 0.0), typical)
    return float(np.max(np.divide(delta, scale, out=np.where(delta > 0, np.inf, 0.0), where=scale > 0)))


def inherited(parents: Sequence[Error]) -> Error:
    """Combine the parents' errors: independent ones add in squares, the worst element is the worst."""
    rel = math.sqrt(sum(min(p.rel, 1e6) ** 2 for p in parents))
    peak = max((p.peak for p in parents), default=0.0)
    return Error(rel, max(peak, rel))


def judge_model(found: Measured, eps: float, agreeing: Sequence[Error], *, noise: float = 0.0) -> Judgement:
    """Judge by the error model; ``noise`` is an extra relative allowance (a measured factor's precision)."""
    metrics, base = found.metrics, inherited(agreeing)
    size, error = found.size, found.error
    allowed = OWN * eps + AMPLIFY * base.rel + noise
    tests = [
        ("relative L2 error", error, allowed),
        ("worst element", found.peak, PEAK * (OWN * eps + noise) + 2 * AMPLIFY * base.peak),
    ]
    coherent = None
    if metrics.projection is not None and metrics.projection_error is not None and metrics.elements > 1:
        share = (metrics.norm_a or 0.0) / size if size else 1.0
        limit = COHERENT * eps + AMPLIFY * base.rel + noise + 5 * metrics.projection_error * share
        coherent = COHERENT * eps + AMPLIFY * base.rel
        tests.append(("common factor", abs(metrics.projection - 1) * share, limit))
    name, value, limit = max(tests, key=lambda t: _ratio(t[1], t[2]))
    reason = f"{name} {value:.3g}, allowed {limit:.3g} (eps {eps:.2g}, inputs' own error {base.rel:.2g})"
    return Judgement(
        policy="error-model", allowed=limit, error=value, ratio=_ratio(value, limit), reason=reason,
        power_coherent=coherent, power_incoherent=allowed,
    )  # fmt: skip


def judge_own(blocks: Callable[[], Iterable[Sides]], eps: float) -> Judgement:
    """Judge what the recorded inputs of an update do not explain, element by element.

    ``blocks`` gives pairs of what is unexplained and of the size of the terms summed; it is called twice,
    since a typical element's size is known only after all.
    """
    squares, count = 0.0, 0
    for _, sizes in blocks():
        finite = np.where(np.isfinite(sizes), sizes, 0.0)
        squares, count = squares + float(np.sum(finite**2)), count + finite.size
    least = 1e-3 * math.sqrt(squares / count if count else 0.0) + 1e-300
    worst = 0.0
    for unexplained, sizes in blocks():
        scale = np.where(np.isfinite(sizes), sizes, 0.0)
        relative = np.abs(unexplained) / np.maximum(scale, least)
        found = float(relative.max()) if relative.size else 0.0
        worst = max(worst, found) if math.isfinite(found) else math.inf
    limit = PEAK * OWN * eps
    reason = f"beyond what its own inputs explain: worst element {worst:.3g}, allowed {limit:.3g}"
    return Judgement(
        policy="error-model", allowed=limit, error=worst, ratio=_ratio(worst, limit), reason=reason,
        power_coherent=limit, power_incoherent=limit,
    )  # fmt: skip


def judge_exact(metrics: Metrics) -> Judgement:
    """Judge equality: any difference diverges."""
    error = 0.0 if metrics.equal else max(metrics.rel_l2 or 0.0, 5e-324)
    ratio = 0.0 if metrics.equal else math.inf
    reason = "compared exactly"
    return Judgement(
        policy="exact", allowed=0.0, error=error, ratio=ratio, reason=reason, power_incoherent=0.0
    )


def judge_floor(found: Measured, floors: Sequence[float], agreeing: Sequence[Error]) -> Judgement:
    """Judge by the ratio to the greatest error that identical code showed at this boundary.

    A few runs may by luck agree in a single number, such as a norm, and in all that it scales: what the
    boundary's agreeing inputs were measured to differ by in this comparison is allowed as well.
    """
    floor, runs = max(floors), len(floors)
    factor = FLOOR_RATIO.get(runs, 3.0)
    error = found.error
    inputs = sum(min(e.rel, 1e6) for e in agreeing)  # noise of one run is not independent
    allowed = max(factor * floor, inputs)
    reason = (
        f"{error / floor:.3g} times the floor of {runs} run(s), {factor:g} is still noise "
        f"(inputs' own error {inputs:.2g})"
    )
    return Judgement(
        policy="floor", allowed=allowed, error=error, ratio=_ratio(error, allowed), reason=reason,
        power_incoherent=allowed, floor_runs=runs,
    )  # fmt: skip


def _ratio(error: float, allowed: float) -> float:
    if not error:
        return 0.0
    return error / allowed if allowed else math.inf
