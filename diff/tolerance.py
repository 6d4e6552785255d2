"""How much two runs may legally differ at a boundary, and whether they differ by more.

The error model is absolute: round-off of the terms summed, c·eps·(magnitude of the terms), plus the
inputs' own measured error times what an operation may amplify. Three tests, each with its own limit: the
L2 error, the worst element (against the tensor's typical element, so that one wrong element among many is
seen), and the projection ⟨a,b⟩/⟨a,a⟩ (a coherent factor far below the noise). ``docs/judgement.md`` derives
the constants; ``benchmarks/calibrate.py`` measures what correct runs need of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tensortrace.diff.coherence import NONE, Coherence
from tensortrace.diff.compare import Sides, flat_chunks
from tensortrace.diff.floors import Floor
from tensortrace.diff.result import Judgement, Metrics

OWN = 4.0
"""Units of round-off that what lies between two boundaries may add in L2.

One rounding to the nearest errs by 0.2 units in the mean square (1/√12 of a spacing, over the mantissa), two
runs by 0.3: this is room for some 150 roundings in a row that have nothing to do with each other.
"""

SUMMED = 0.3
"""Units of the accumulator's round-off, times √n, that a sum of n terms may add.

Rounding errors of partial sums are random in sign (Higham & Mary 2019: √n in the place of n): one addition
after the other errs by 0.14 √n units of the terms' norm, two runs in two orders by 0.2 √n. Kernels that keep
several partial sums err less.
"""

ACCUMULATOR = 2.0**-23
"""Narrower formats are summed in float32: a product of bfloat16 is rounded once, when it is stored."""

PEAK = 8.0
"""The worst element may err this many times the L2 allowance: the tail of many independent roundings."""

COHERENT = 4.0
"""Units of the accumulator's round-off by which a correct run may be off by one common factor: a factor that
is applied to a whole tensor (the weight of a token, a mean over ranks) is rounded as a number."""

ONE_WAY = 1.1
"""Times the mean effect of rounding all elements in one direction, which a correct kernel may do."""

COMMON_FACTOR = "common factor"
"""The test by the projection, as its judgement's reason begins."""

_TESTS = ("relative L2 error", "worst element", COMMON_FACTOR)

AMPLIFY = 4.0
"""An operation may amplify its inputs' relative error by this much (normalisation, softmax)."""

PASSED_ON = 2.0
"""An operation may amplify a common factor of its inputs by this much (a product of two, a square)."""

SIGMAS = 5.0
"""Standard errors that a projection may be off by chance."""


@dataclass(frozen=True)
class Error:
    """What a boundary's children inherit: relative L2 error, worst relative element, norm of the terms.

    ``together`` is the norm of the error summed over rows, relative to the same: no more than the L2 error
    where rows err by chance, up to √rows times that where an error of a parameter moves them all alike.
    ``coherent`` is the common factor that the error is, with what it may be by chance; all of the error
    where nobody measured it. ``without`` is what has an effect of it, where parts are silent: without key
    biases and what shifts by them.
    """

    rel: float = 0.0
    peak: float = 0.0
    norm: float = 0.0
    diverges: bool = False
    together: float = 0.0
    coherent: float | None = None
    without: Error | None = None

    @property
    def factor(self) -> float:
        """What of the error may be one common factor."""
        return self.rel if self.coherent is None else self.coherent

    def of_sum(self) -> Error:
        """Return what a sum over the rows inherits."""
        without = self.without and self.without.of_sum()
        return replace(self, rel=max(self.rel, self.together), without=without)

    def times(self, factor: float) -> Error:
        """Return what is inherited through an operation that amplifies by so much."""
        if factor == 1.0:
            return self
        return replace(
            self, rel=self.rel * factor, peak=self.peak * factor, together=self.together * factor,
            coherent=self.factor * factor, without=self.without and self.without.times(factor),
        )  # fmt: skip

    def as_factor(self) -> Error:
        """Return what is inherited of an error of which all may be one common factor."""
        return replace(self, coherent=max(self.factor, self.rel))


@dataclass(frozen=True)
class Measured:
    """One comparison's numbers: metrics, worst relative element, the norm of the terms summed, their number.

    ``coherence`` says what of the projection may be chance and rounding; without it no factor is judged. Of
    sketches, ``bar`` is the error bar of the L2 distance, ``sure`` the share of it that is certain,
    ``rounding`` what their numbers are rounded by.
    """

    metrics: Metrics
    peak: float
    terms: float
    length: int = 1
    coherence: Coherence | None = None
    bar: float = 0.0
    sure: float = 1.0
    rounding: float = 0.0

    @property
    def size(self) -> float:
        """The norm that errors are relative to: of the terms summed, at least of the result."""
        return max(self.metrics.norm_a or 0.0, self.terms)

    @property
    def error(self) -> float:
        """L2 error relative to ``size``."""
        absolute = self.metrics.abs_l2 or 0.0
        return absolute / self.size if self.size else math.inf if absolute else 0.0

    @property
    def least(self) -> float:
        """What the error is at least, relative to ``size``: less than what an estimate says."""
        return self.error * self.sure

    @property
    def doubt(self) -> float:
        """The error bar, relative to ``size``."""
        return self.bar / self.size if self.size else 0.0

    @property
    def share(self) -> float:
        """The norm of the result over that of the terms: below 1 where they cancel."""
        return (self.metrics.norm_a or 0.0) / self.size if self.size else 1.0

    @property
    def factor(self) -> float:
        """By how much b is a multiple of a, relative to ``size``; 0 where that is not known."""
        projection = self.metrics.projection
        return abs(projection - 1) * self.share if projection is not None else 0.0

    @property
    def coherent(self) -> float:
        """What of the error may be one common factor: all of it where there is one number alone."""
        if self.metrics.elements < 2:
            return self.error
        if self.coherence is None:
            return self.error
        return min(self.factor + SIGMAS * self.coherence.spread * self.share, self.error)


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
    delta = np.subtract(y, x)
    np.abs(delta, out=delta)
    if typical > 0 and math.isfinite(float(np.max(delta))):  # then all elements are finite
        scale = np.abs(x)
        return float(np.max(np.divide(delta, np.maximum(scale, typical, out=scale), out=delta)))
    delta[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    if not math.isfinite(float(np.max(delta))):
        return math.inf
    scale = np.maximum(np.where(np.isfinite(x), np.abs(x), 0.0), typical)
    return float(np.max(np.divide(delta, scale, out=np.where(delta > 0, np.inf, 0.0), where=scale > 0)))


def inherited(parents: Sequence[Error]) -> Error:
    """Combine the parents' errors: independent ones add in squares, the worst element is the worst."""
    rel = math.sqrt(sum(min(p.rel, 1e6) ** 2 for p in parents))
    peak = max((p.peak for p in parents), default=0.0)
    coherent = math.sqrt(sum(min(p.factor, 1e6) ** 2 for p in parents))
    return Error(rel, max(peak, rel), coherent=coherent)


def own_error(eps: float, length: int) -> float:
    """Return the relative L2 error that a sum of ``length`` terms may add, in a format of spacing ``eps``."""
    return OWN * eps + SUMMED * min(eps, ACCUMULATOR) * math.sqrt(length)


def own_factor(eps: float, length: int, rounding: float) -> float:
    """Return the common factor that it may add; ``rounding`` is the bound of rounding in one direction."""
    return (COHERENT + SUMMED * math.sqrt(length)) * min(eps, ACCUMULATOR) + ONE_WAY * rounding


def judge_model(
    found: Measured,
    eps: float,
    agreeing: Sequence[Error],
    *,
    noise: float = 0.0,
    floor: Floor | None = None,
) -> Judgement:
    """Judge by the error model, and where identical code differs by more than that by the floor.

    ``noise`` is an extra relative allowance (a measured factor's precision). A floor never takes away from
    what the error model allows: a few runs may by luck agree in a single number, and in all that it scales.
    """
    metrics, base = found.metrics, inherited(agreeing)
    own, error, share = own_error(eps, found.length) + found.rounding, found.least, found.share
    allowed = own + AMPLIFY * base.rel + noise
    chance = found.coherence or NONE
    factor = own_factor(eps, found.length, chance.rounding * share) + found.rounding
    factor += PASSED_ON * base.factor + noise + SIGMAS * chance.spread * share
    by_model = (allowed, PEAK * (own + noise) + 2 * AMPLIFY * base.peak, factor)
    limits = floor.limits(metrics.elements) if floor else None
    limits = tuple(map(max, by_model, limits)) if limits else by_model  # type: ignore[assignment]
    assert limits is not None
    tests = list(zip(_TESTS, (error, found.peak, found.factor), limits, strict=True))
    several = found.coherence is not None and metrics.projection is not None and metrics.elements > 1
    name, value, limit = max(tests if several else tests[:2], key=lambda t: _ratio(t[1], t[2]))
    of_floor = floor is not None and limit not in by_model
    allowed, _, factor = limits
    of_terms = allowed >= share  # the result is round-off of its terms: errors are stated relative to these
    scale = 1.0 if of_terms else share
    inputs = f"inputs' own error {base.rel:.2g}" + (f", terms cancel to {share:.2g}" if of_terms else "")
    reason = f"{name} {value:.3g}, allowed {limit:.3g} (eps {eps:.2g}, {inputs})"
    # what is off already by a factor may be of the other sign
    coherent = min(factor + found.factor, allowed + error) / scale if several else None
    return Judgement(
        policy="floor" if of_floor else "error-model", allowed=limit, error=value, ratio=_ratio(value, limit),
        reason=f"{reason}; {floor.said(error, metrics.elements)}" if floor else reason,
        power_coherent=coherent, power_incoherent=_seen(allowed, found) / scale, noise=allowed,
        cancelled=of_terms, floor_runs=floor.runs if floor else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class Unexplained:
    """What the recorded inputs of an update do not explain of a difference.

    ``worst`` is its greatest element beside the terms that were summed there, or beside a thousandth of a
    typical element's; ``squares`` is Σ terms² over the elements where these are finite.
    """

    worst: float
    squares: float


def least_size(squares: float, count: int) -> float:
    """Return the size of terms below which an element is held against this size: 1e-3 of a typical one's."""
    return 1e-3 * math.sqrt(squares / count if count else 0.0) + 1e-300


def worst_beside(unexplained: np.ndarray, sizes: np.ndarray, least: float) -> float:
    """Return the greatest |unexplained| / max(sizes, least); infinite where an element is not finite.

    ``sizes`` that are not finite count as 0.
    """
    if not unexplained.size:
        return 0.0
    if not math.isfinite(float(sizes.max())):
        sizes = np.where(np.isfinite(sizes), sizes, 0.0)
    found = float((np.abs(unexplained) / np.maximum(sizes, least)).max())
    return found if math.isfinite(found) else math.inf


def measure_unexplained(blocks: Iterable[Sides]) -> Unexplained:
    """Measure pairs of what is unexplained and of the size of the terms summed; all of them are held."""
    held = list(blocks)
    return measure_streamed(lambda: held)


def measure_streamed(blocks: Callable[[], Iterable[Sides]]) -> Unexplained:
    """Measure the same of blocks that are gone through twice.

    A typical element's size is known only after all.
    """
    squares, count = 0.0, 0
    for _, sizes in blocks():
        finite = np.where(np.isfinite(sizes), sizes, 0.0)
        squares, count = squares + float(np.sum(finite**2)), count + finite.size
    least = least_size(squares, count)
    return Unexplained(max((worst_beside(*sides, least) for sides in blocks()), default=0.0), squares)


def judge_own(found: Unexplained, eps: float, norm: float | None = None) -> Judgement:
    """Judge what the recorded inputs of an update do not explain, element by element.

    ``norm`` is that of the result, to which its power is relative: at some element it is no smaller beside
    the terms than it is beside them in norm.
    """
    worst, squares = found.worst, found.squares
    limit = PEAK * OWN * eps
    reason = f"beyond what its own inputs explain: worst element {worst:.3g}, allowed {limit:.3g}"
    share = norm / math.sqrt(squares) if norm and squares else 1.0
    power = (limit + (worst if math.isfinite(worst) else 0.0)) / share
    return Judgement(
        policy="error-model", allowed=limit, error=worst, ratio=_ratio(worst, limit), reason=reason,
        power_coherent=power, power_incoherent=power,
    )  # fmt: skip


def judge_exact(metrics: Metrics, floor: Floor | None = None) -> Judgement:
    """Judge equality: any difference diverges, unless identical code differs here as well."""
    error = 0.0 if metrics.equal else max(metrics.rel_l2 or 0.0, 5e-324)
    if floor is not None and floor.rel and not metrics.equal:
        reason = f"exact values, which differ between {floor.runs + 1} runs of identical code too"
        return Judgement(
            policy="floor", allowed=math.inf, error=error, ratio=0.0, reason=reason, floor_runs=floor.runs
        )
    ratio = 0.0 if metrics.equal else math.inf
    reason = "compared exactly"
    return Judgement(
        policy="exact", allowed=0.0, error=error, ratio=ratio, reason=reason, power_incoherent=0.0
    )


def _seen(allowed: float, found: Measured) -> float:
    """Return the error that would have been flagged: what is certain of it exceeds what is allowed."""
    return allowed / max(found.sure, 0.25) if found.bar else allowed


def _ratio(error: float, allowed: float) -> float:
    if not error:
        return 0.0
    return error / allowed if allowed else math.inf
