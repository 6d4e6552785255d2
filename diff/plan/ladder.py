"""Whether a gradient is, in each run by itself, what that run's own rung before it gives.

Runs that differ by much for a known reason (a declared difference, noise, an error inherited from before)
still have this in common: a stage of the ladder scales and adds, by factors that the run shows on all its
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.logical import Unplaceable
from tensortrace.diff.plan.comparison import Broken, coarser_eps
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.quick import FAR_INSIDE, measure_quickly
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.stream import Readable, Streamed, Sum, one, paired, whole
from tensortrace.diff.tolerance import Measured, judge_model, measure_peak
from tensortrace.tracer.types import Kind

MEASURED = 4.0
"""Times what the stages of a run leave unexplained in the median parameter, which one parameter may have."""


class Stage(NamedTuple):
    """What a run's own rung before gives for a rung, and what is there, at one scale.

    ``previous`` names the rung before; ``terms`` is the norm of what was summed, ``length`` the number of
    terms; ``noise`` what the run's stages leave unexplained in its other parameters.
    """

    previous: str
    expected: Readable
    actual: Readable
    terms: float = 0.0
    length: int = 1
    noise: float = 0.0


def own_rung(slot: Slot, pair: StepPair) -> Callable[[], Broken | None]:
    """Return how to find out whether only one run's gradient is not what its own rung before gives.

    The result is None where both are, neither is, or it cannot be told.
    """

    def look() -> Broken | None:
        if pair.by_program or pair.overflowed or pair.evaluations:
            return None
        try:
            stages = [_stage(g, slot) for g in (pair.gradients_a, pair.gradients_b)]
            return _broken(stages, _eps(slot.name, pair))
        except (NotComparable, Unplaceable):
            return None

    return look


def _broken(stages: list[Stage | None], eps: float) -> Broken | None:
    """Return the rung of the one run in which it isn't as the rung before gives, by the noise of both."""
    known = [stage for stage in stages if stage is not None]
    if len(known) < 2 or not eps:
        return None
    noise = MEASURED * max(stage.noise for stage in known)
    found = [_judge(stage, eps, noise) for stage in known]
    if any(judged is None for judged in found):
        return None
    odd = [n for n, judged in enumerate(found) if judged is not None and judged[1].ratio > 1]
    if len(odd) != 1 or _is_clamped(known[odd[0]], eps, noise):
        return None
    judged, stage = found[odd[0]], known[odd[0]]
    assert judged is not None
    side: Literal["a", "b"] = "b" if odd[0] else "a"
    sides = (stage.expected, stage.actual) if side == "b" else (stage.actual, stage.expected)
    return Broken(side, whole(paired(*sides)), *judged, f"what the {stage.previous} of {side} itself gives")


def _stage(gradients: Gradients, slot: Slot) -> Stage | None:
    """Return a rung of one run beside what its own rung before gives; None where that cannot be told.

    A rung that the run does not have is what was there before, as everywhere.
    """
    name = slot.name
    if slot.kind == Kind.LOCAL_GRAD:
        before, after = (of(name, lambda _: 1.0) for of in (gradients.scaled_local, gradients.scaled_hooked))
        return Stage("gradient that backward computed", before, after) if before and after else None
    if slot.kind == Kind.CLIPPED_GRAD and slot.slot == "grad" and gradients.before_clip(name):
        return _clipped(gradients, name)
    copies = {
        Kind.CLIPPED_GRAD: gradients.unclipped_copies(name),
        Kind.REDUCED_GRAD: gradients.rung_copies(Kind.REDUCED_GRAD, name),
        Kind.UNSCALED_GRAD: gradients.rung_copies(Kind.UNSCALED_GRAD, name),
    }[slot.kind]
    actual = gradients.canonical(slot.kind, name) if copies else None
    if not copies or (slot.slot == "before" and not gradients.before_clip(name)):
        actual = gradients.unclipped_value(name)
        return Stage("rung before", actual, actual) if actual else None
    if actual is None or odd_ranks(copies):
        return None
    noise = gradients.noise_of(name)
    for kind in (Kind.UNSCALED_GRAD, Kind.REDUCED_GRAD):
        if slot.kind != kind and gradients.rung(kind, name) and slot.kind != Kind.REDUCED_GRAD:
            expected = gradients.canonical(kind, name)
            return Stage(kind.value, expected, actual, noise=noise) if expected else None
    expected = gradients.combined_local(name)
    if expected is None:
        return None
    terms = math.sqrt(sum((term.times / term.over * _norm(term.item)) ** 2 for term in expected.terms))
    return Stage(Kind.LOCAL_GRAD.value, expected, actual, terms, len(expected.terms), noise)


def _clipped(gradients: Gradients, name: str) -> Stage | None:
    """Return what clipping made of a gradient; of a clip by value, that it left it alone."""
    before, after = gradients.before_clip(name), gradients.consumed(name)
    if before is None or after is None or odd_ranks(gradients.consumed_copies(name)):
        return None
    factor = gradients.coefficient(name)
    return Stage("gradient before clipping", one(before).scaled(factor), one(after))


def _norm(item: Item) -> float:
    """Return the norm of a recorded tensor, read where no statistics tell it."""
    stats = item.entry.stats
    if stats is not None and stats.l2 is not None:
        return stats.l2
    return math.sqrt(sum(float(np.sum(b.astype(np.float64) ** 2)) for b in one(item).blocks()))


def _judge(stage: Stage, eps: float, noise: float) -> tuple[Metrics, Judgement] | None:
    """Judge what is there by what the rung before gives; None where something isn't finite."""
    if stage.expected.shape != stage.actual.shape:
        return None
    blocks = Streamed(stage.expected, stage.actual).blocks
    shape = stage.actual.shape
    norm = stage.expected.norm if isinstance(stage.expected, Sum) else None
    quick = measure_quickly(shape, blocks, eps=eps, spacing=eps, terms=stage.terms, norm=norm)
    if quick is not None:
        measured = Measured(quick.metrics, quick.peak, stage.terms, stage.length, quick.coherence)
        judgement = judge_model(measured, eps, (), noise=noise)
        if judgement.ratio <= FAR_INSIDE:
            return quick.metrics, judgement
    metrics = measure_blocks(shape, blocks(), eps=eps)
    if metrics.nonfinite_a or metrics.nonfinite_b:
        return None
    peak, coherence = 0.0, measure_coherence(shape, (), None, eps)
    if not metrics.equal:
        peak = measure_peak(blocks(), metrics, stage.terms)
        coherence = measure_coherence(shape, blocks(), metrics.projection, eps)
    measured = Measured(metrics, peak, stage.terms, stage.length, coherence)
    return metrics, judge_model(measured, eps, (), noise=noise)


def _is_clamped(stage: Stage, eps: float, noise: float) -> bool:
    """Tell whether what is there is the gradient cut off at its own greatest magnitude: clipped by value.

    That a greater gradient meets the limit in one run only is no mistake.
    """
    limit = max((float(np.max(np.abs(b))) for b in stage.actual.blocks() if b.size), default=0.0)
    if not limit:
        return False
    clamped = stage._replace(expected=_Clamped(stage.expected, limit))
    judged = _judge(clamped, eps, noise)
    return judged is not None and judged[1].ratio <= 1


@dataclass(frozen=True)
class _Clamped:
    """A tensor whose elements are cut off at a magnitude."""

    inner: Readable
    limit: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.inner.shape

    @property
    def exact(self) -> bool:
        """Gradients are inexact."""
        return False

    def read(self) -> np.ndarray:
        """Return the whole."""
        return np.asarray(np.clip(self.inner.read(), -self.limit, self.limit))

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the blocks, or one alone."""
        return (np.clip(block, -self.limit, self.limit) for block in self.inner.blocks(only))


def _eps(name: str, pair: StepPair) -> float:
    """Return the spacing of the coarsest dtype that either run holds a parameter's gradient in."""
    items: list[Item] = []
    for g in (pair.gradients_a, pair.gradients_b):
        items += [*g.local_items(name), *g.hooked_items(name), *g.unclipped_copies(name)]
        items += [i for kind in (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD) for i in g.rung_copies(kind, name)]
    return max(coarser_eps(items), EPS["float32"]) if items else 0.0
