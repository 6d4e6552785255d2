"""Judges the update of a parameter that is known by its sketch: its formula takes the elements' values."""

from __future__ import annotations

from tensortrace.diff.catalog import Slot
from tensortrace.diff.estimate import alike, is_estimate
from tensortrace.diff.estimating import NOISY, judge_step, measure_estimates
from tensortrace.diff.plan.comparison import StepPair, replica
from tensortrace.diff.plan.gradients import window_slot
from tensortrace.diff.result import Judgement
from tensortrace.tracer.types import Kind


def judge_update(slot: Slot, pair: StepPair, eps: float) -> Judgement | None:
    """Judge what a parameter was changed by in both runs; None where a part of it was not recorded.

    Raises Unkept where the gradients differ by so much that most of an update may be made of it: a correct
    optimizer makes whole steps of round-off.
    """
    if slot.kind != Kind.PARAM:
        return None
    before = window_slot(Kind.PARAM, slot.name, "start")
    held = []
    for view, earlier in ((pair.a, pair.before_a), (pair.b, pair.before_b)):
        start = view.items.get(before, ()) or earlier.items.get(before._replace(slot="model"), ())
        if not start:
            return None
        held.append((replica(start), replica(view.items[slot])))
    known = [item.read() for items in held for item in items]
    if not any(is_estimate(x) for x in known):
        return None
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
    if not any(is_estimate(x) for x in values):
        return None
    return measure_estimates(*alike(values)).rel_l2
