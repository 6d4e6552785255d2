"""How far two tensors are apart of which only sketches are known: estimates, each with its error bar.

The mean of the squares of a sketch's numbers estimates ‖x‖² without bias, that of the products ⟨x,y⟩. The
numbers of one row (or column) of a sketch share signs, so that where a tensor is nearly of rank one there are
fewer independent ones than numbers. Two things tell how many: how much the means over rows and over columns
scatter, as for observations clustered in two ways (Cameron, Gelbach & Miller 2011), and how near a sketch is
to rank one itself. An estimate that came out low scatters little, so that the first alone would promise too
much just then; the bar is the wider one.
"""

from __future__ import annotations

import math

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.coherence import Coherence
from tensortrace.diff.compare import measure_blocks
from tensortrace.diff.estimate import NEEDS_VALUES, Estimate
from tensortrace.diff.logical import Unkept
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.stream import Sketched, Streamed
from tensortrace.diff.tolerance import Measured

BARS = 2.5
"""Standard errors in an error bar: 95 % of estimates lie within, few rows and columns considered."""

LEAST_SPREAD = math.sqrt(2.0)
"""Relative scatter of the square of one number of a sketch, where nothing in the tensor is alike."""

ROUNDING = 2.0**-22
"""Relative error by which sketches of equal tensors may differ.

Their numbers are kept, and in part summed, in float32 (``docs/format.md``).
"""

STEP = 0.05
"""Relative error that the update of a parameter may have: its formula takes the elements' values.

Where a gradient differs by round-off, an optimizer that divides by its size moves elements whose gradient is
no more than that round-off elsewhere: of one in a million, 0.1 % of the update.
"""

_LEAST = 0.4
"""A quantile below which a sketch tells nothing more; it makes a bar of four times the estimate."""

NOISY = 2.0**-10
"""Relative error of a gradient from which on most of an update may be made of it."""


def measure_loaded(loaded: Assembled | Streamed, eps: float, *, exact: bool = False) -> Metrics:
    """Return the metrics of both sides of a boundary; estimates where only sketches are known.

    Raises Unkept where ``exact`` asks for equal bits of sketches.
    """
    if isinstance(loaded, Sketched):
        if exact:
            raise Unkept(NEEDS_VALUES)
        return measure_estimates(*loaded.sides)
    return measure_blocks(loaded.shape, loaded.blocks(), eps=eps)


def measure_estimates(x: Estimate, y: Estimate) -> Metrics:
    """Return what sketches tell of two tensors; ``rel_l2_error`` is the error bar of ``rel_l2``."""
    delta = y.numbers - x.numbers
    norm_a, norm_b = _norm(x), _norm(y)
    square, error = float(np.mean(delta * delta)), _standard_error(delta * delta)
    error = max(error, square * scatter_by_rank(delta))
    distance, floor = math.sqrt(square), ROUNDING * max(norm_a, norm_b)
    under, over = _interval(error / square) if square else (1.0, 1.0)
    least = max(distance * under - floor, 0.0)
    bar = math.hypot(distance * max(over - 1.0, 1.0 - under), floor)
    if not delta.any():
        return Metrics(
            elements=x.size, equal=False, rel_l2=0.0, abs_l2=0.0, norm_a=norm_a, norm_b=norm_b,
            estimated=True, rel_l2_error=floor / norm_a if norm_a else 0.0, rel_l2_least=0.0,
        )  # fmt: skip
    xx, xd = float(np.mean(x.numbers**2)), float(np.mean(x.numbers * delta))
    offset = xd / xx if xx else 0.0
    rest = x.numbers * (delta - offset * x.numbers)
    cosine = None
    if norm_a and norm_b:
        cosine = max(-1.0, min(1.0, (norm_a**2 + norm_b**2 - square) / (2 * norm_a * norm_b)))
    return Metrics(
        elements=x.size,
        equal=False,
        rel_l2=distance / norm_a if norm_a else math.inf,
        abs_l2=distance,
        norm_a=norm_a,
        norm_b=norm_b,
        projection=1.0 + offset if xx else None,
        projection_error=_standard_error(rest, scatter=0.0) / xx if xx else None,
        cosine=cosine,
        estimated=True,
        rel_l2_error=bar / norm_a if norm_a else None,
        rel_l2_least=least / norm_a if norm_a else least,
    )


def measured_estimates(metrics: Metrics, terms: float, length: int, eps: float) -> Measured:
    """Return everything that is measured of two estimates.

    Nothing tells their worst elements: no such error is judged, and what is computed from them may inherit
    one that has all of the difference.
    """
    norm = metrics.norm_a or 0.0
    bar = (metrics.rel_l2_error or 0.0) * norm
    chance = Coherence(metrics.projection_error or 0.0, eps / 2)
    coherence = chance if metrics.projection is not None else None
    share = (metrics.rel_l2_least or 0.0) / metrics.rel_l2 if metrics.rel_l2 else 0.0
    return Measured(metrics, 0.0, terms, length, coherence, bar=bar, sure=share, rounding=ROUNDING)


def judge_step(
    before: tuple[Estimate, Estimate], after: tuple[Estimate, Estimate], eps: float, *, noisy: bool
) -> Judgement:
    """Judge the updates of a parameter in both runs, ``after - before``, which may differ by ``STEP``.

    Where the gradient is ``noisy`` all of an update may differ, and no more than that.
    """
    steps = [y - x for x, y in zip(before, after, strict=True)]
    metrics = measure_estimates(*steps)
    size, norm = metrics.norm_a or 0.0, _norm(after[0]) or 1.0
    rounding = (eps + 4 * ROUNDING) * max(_norm(after[0]), _norm(after[1]))  # as it is stored, and sketched
    error = (metrics.rel_l2_least or 0.0) * (size or 1.0)
    share = 2.0 if noisy else STEP
    allowed = share * size + rounding
    ratio = error / allowed if allowed else math.inf if error else 0.0
    said = f"the update differs by at least {error / size:.3g} of itself" if size else "only b has an update"
    return Judgement(
        policy="error-model", allowed=allowed / norm, error=error / norm, ratio=ratio,
        reason=f"{said}, allowed {share:g}: its formula takes values",
        power_coherent=2 * allowed / norm, power_incoherent=2 * allowed / norm,
    )  # fmt: skip


def _interval(relative: float) -> tuple[float, float]:
    """Return what a norm is at least and at most, over its estimate.

    ``relative`` is the standard error of its square: that of a mean of 2/relative² squares, which is as
    chi-squared over its degrees of freedom (quantiles by Wilson & Hilferty 1931).
    """
    ninth = relative * relative / 9
    upper = (1 - ninth + BARS * math.sqrt(ninth)) ** 3
    lower = max(1 - ninth - BARS * math.sqrt(ninth), _LEAST) ** 3
    return min(1 / math.sqrt(upper), 1.0), 1 / math.sqrt(lower)


def scatter_by_rank(numbers: np.ndarray) -> float:
    """Return the relative standard error of the mean of a sketch's squares, by how near it is to rank one.

    With singular values σ of a matrix, p = Σσ⁴ / (Σσ²)², and signs taken as normal numbers, the relative
    variance is 2/(K1 K2) + p (2/K1 + 2/K2 + 4/(K1 K2)). A sketch's own p is 1 where the tensor's is, and
    (K1 + K2 + 1) / (K1 K2 + 2) where that vanishes; it does not depend on how large the estimate came out.
    """
    rows, columns = numbers.shape
    gram = numbers @ numbers.T
    total = float(np.trace(gram))
    if not total:
        return 0.0
    least = (rows + columns + 1) / (numbers.size + 2)
    own = float(np.sum((gram / total) ** 2))
    share = min(max((own - least) / (1 - least), 0.0), 1.0) if least < 1 else 1.0
    each = 2 / numbers.size
    return math.sqrt(each + share * (2 / rows + 2 / columns + 2 * each))


def _norm(x: Estimate) -> float:
    return math.sqrt(float(np.mean(x.numbers**2))) if x.norm is None else x.norm


def _standard_error(values: np.ndarray, scatter: float = LEAST_SPREAD) -> float:
    """Return the standard error of the mean of what sketches' numbers give, [K1, K2].

    No less than that of independent numbers, whose squares scatter by ``scatter`` times their mean.
    """
    mean = float(np.mean(values))
    least = (scatter * mean) ** 2 / values.size
    clustered = 0.0
    for axis in (0, 1):
        means = np.mean(values, axis=axis)
        if len(means) > 1:
            clustered += float(np.var(means, ddof=1)) / len(means)
    if values.size > 1:
        clustered -= float(np.var(values, ddof=1)) / values.size
        least = max(least, float(np.var(values, ddof=1)) / values.size)
    return math.sqrt(max(clustered, least))
