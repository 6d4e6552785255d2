"""Judges the update of a parameter that is known by its sketch: its formula takes the elements' values."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.estimate import alike, as_array, estimated, is_estimate
from tensortrace.diff.estimating import NOISY, judge_step, measure_estimates
from tensortrace.diff.logical import Unkept
from tensortrace.diff.plan.comparison import Comparison, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.sketched import whole
from tensortrace.diff.tolerance import judge_own
from tensortrace.tracer.sketch import SIZE
from tensortrace.tracer.types import Kind


def judge_update(
    entry: Comparison, pair: StepPair | None, metrics: Metrics, eps: float
) -> tuple[Judgement | None, bool]:
    """Judge an update by itself, and tell whether by its formula; None where nothing tells of it."""
    if entry.own is None:
        return None, False
    if not metrics.estimated:
        with suppress(Unkept):  # what it read may be known by its sketch
            found = entry.own()
            return (judge_own(found, eps, metrics.norm_a), True) if found else (None, False)
    return (None, False) if pair is None else (_judge_step(entry.slot, pair, eps), False)


def _judge_step(slot: Slot, pair: StepPair, eps: float) -> Judgement | None:
    """Judge what a parameter was changed by in both runs; None where a part of it was not recorded."""
    if slot.kind != Kind.PARAM:
        return None
    held = []
    for view, earlier in ((pair.a, pair.before_a), (pair.b, pair.before_b)):
        start = view.began_with(slot.name, earlier)
        if not start:
            return None
        held.append((replica(start), replica(view.items[slot])))
    known = [item.read() for items in held for item in items]
    if not any(is_estimate(x) for x in known):
        known[0] = as_array(estimated(known[0], partial(whole, size=SIZE)))
    first_a, last_a, first_b, last_b = alike(known)
    noise = _noise(slot.name, pair)
    return judge_step((first_a, first_b), (last_a, last_b), eps, noisy=noise is None or noise > NOISY)


def _noise(name: str, pair: StepPair) -> float | None:
    """Return the relative error of the gradient that an optimizer consumed; None where it is not known."""
    a, b = pair.gradients_a.consumed(name), pair.gradients_b.consumed(name)
    if a is None or b is None:
        return None
    if a.entry.digest == b.entry.digest:
        return 0.0
    values = [a.read(), b.read()]
    if any(is_estimate(x) for x in values):
        return measure_estimates(*alike(values)).rel_l2
    norm = float(np.linalg.norm(values[0]))
    return float(np.linalg.norm(values[1].astype(np.float64) - values[0])) / norm if norm else None
