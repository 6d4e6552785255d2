"""At which precision losses computed, where that is known better than from the coarsest dtype of a run.

Autocast computes losses in float32 on logits of bfloat16, and so do programs. A loss whose scores are a
recorded tensor's values adds no more than its own round-off to what these differ by; its gradient arrives at
them rounded once to their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.comparison import coarser_eps
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.scale import TokenWeights
from tensortrace.diff.tolerance import OWN
from tensortrace.tracer.types import OF_RECORDED, Kind, Stats

_OF_PROBABILITIES = frozenset({"cross_entropy", "kl_div"})
"""Losses that subtract logarithms of probabilities."""

_OF_PATHS = frozenset({"ctc_loss"})
"""Losses that sum over paths in the domain of logarithms."""

_OF_VALUE = ("sum", "count", "value")


def eps_of_loss(slot: Slot, pair: StepPair) -> float:
    """Return the spacing at which a loss of recorded scores was computed; 0 where that is not known."""
    if slot.slot not in _OF_VALUE:
        return 0.0
    values = _values(slot.name, (pair.a, pair.b))
    return coarser_eps(values) if values and _direct(values) else 0.0


def eps_of_scores(users: Iterable[Slot], items: Sequence[Item], pair: StepPair) -> float:
    """Return the spacing at which a gradient came about that losses alone gave to what they were given.

    It is summed at the losses' precision and rounded once, by half a unit, to the dtype of the scores. 0
    where something else used the scores too, or the losses were not given them as they are.
    """
    names = {slot.name for slot in users}
    if len(names) != 1 or any(slot.kind != Kind.LOSS for slot in users):
        return 0.0
    values = _values(name := names.pop(), (pair.a, pair.b))
    if name in _OF_PATHS:
        return coarser_eps((*values, *items)) * _log_likelihood(name, pair)
    if not values or not _direct(values):
        return 0.0
    return max(coarser_eps(values), coarser_eps(items) / OWN)


def _log_likelihood(name: str, pair: StepPair) -> float:
    """Return the mean loss of a row of ``a``, at least 1.

    A sum over paths is kept as a logarithm, of which round-off is a part: so much, absolutely, is the
    relative error of the probabilities that the gradient consists of.
    """
    sums = [item for s in _slots(pair.a, "sum") if s.name == name for item in pair.a.items[s]]
    total = sum(abs(float(item.read())) for item in sums if item.source.stored(item.entry))
    return max(1.0, total / max(len(pair.batch_a.rows), 1)) if math.isfinite(total) else 1.0


def terms_of_scores(users: Iterable[Slot], microbatch: int | None, scores: Slot, pair: StepPair) -> float:
    """Return the norm of the terms of the gradient that losses of probabilities give to scores, in ``a``.

    Of each token it is the weight times (softmax − target): where a model has learnt, the two cancel, and the
    round-off is that of numbers near 1. 0 where the gradient is not of that form.
    """
    names = {slot.name for slot in users}
    if not names or not names <= _OF_PROBABILITIES:
        return 0.0
    square = 0.0
    for name, weights in _weights(names, pair):
        for part, weight in weights.weight.items():
            if weight and microbatch in (None, pair.group(part)):
                square += weight * weight * _rows(name, weights.count.get(part, 0), [scores], pair)
    return math.sqrt(square) if math.isfinite(square) else 0.0


def terms_of_loss(slot: Slot, microbatch: int | None, scores: Sequence[Slot], pair: StepPair) -> float:
    """Return the sum of the terms of a loss of probabilities in ``a``: the greatest score, for each token.

    A loss is the logarithm of a sum less the score of the target, or less that of another distribution. Where
    a model has learnt, the two cancel.
    """
    if slot.name not in _OF_PROBABILITIES or slot.slot != "sum":
        return 0.0
    found_weights = [weights for _, weights in _weights({slot.name}, pair)]
    counts = (c for weights in found_weights for c in weights.count.items())
    count = sum(number for part, number in counts if microbatch in (None, pair.group(part)))
    found = [stats for stats in _stats(scores, pair) if stats.minimum is not None]
    greatest = max((max(-(s.minimum or 0.0), s.maximum or 0.0) for s in found), default=0.0)
    if slot.name == "kl_div":  # its other distribution's logarithms too, and both have the log of a sum
        greatest = 2 * (greatest + math.log(max(_classes(scores, pair), 1)))
    return _rows(slot.name, count, scores, pair) * greatest


def _weights(names: Collection[str], pair: StepPair) -> Iterator[tuple[str, TokenWeights]]:
    """Yield what tokens weigh in each term that is one of the losses; in all together where they are one."""
    if not pair.terms:
        yield from ((name, pair.weights_a) for name in names)
    yield from ((name, weights) for (name, _), (weights, _) in pair.terms.items() if name in names)


def _rows(name: str, count: int, scores: Sequence[Slot], pair: StepPair) -> float:
    """Return how many distributions a loss compared; a divergence counts each class of each."""
    return count / max(_classes(scores, pair), 1) if name == "kl_div" else count


def _classes(scores: Sequence[Slot], pair: StepPair) -> int:
    shapes = [item.entry.local_shape for slot in scores for item in pair.a.items.get(slot, ())]
    return max((shape[-1] for shape in shapes if shape), default=1)


def size_of_scores(users: Iterable[Slot], scores: Slot, pair: StepPair) -> float:
    """Return the root mean square of scores in ``a`` whose gradient a cross entropy alone gives; else 0.

    What an exponential makes of its argument errs, relatively, by what the argument errs by absolutely.
    """
    names = {slot.name for slot in users}
    if not names or not names <= _OF_PROBABILITIES:
        return 0.0
    found = [stats for stats in _stats([scores], pair) if stats.finite and stats.l2 is not None]
    square, count = sum((s.l2 or 0.0) ** 2 for s in found), sum(s.finite for s in found)
    return math.sqrt(square / count) if count else 0.0


def _stats(slots: Iterable[Slot], pair: StepPair) -> list[Stats]:
    items = (item for slot in slots for item in pair.a.items.get(slot, ()))
    return [entry.stats for item in items for _, entry in item.members if entry.stats is not None]


def eps_of_weights(pair: StepPair) -> float:
    """Return the spacing at which tokens were weighed: of the losses' values, and of measured factors.

    A factor is fitted to all elements of a gradient, so its error is at most that of one rounding.
    """
    views = (pair.a, pair.b)
    names = {slot.name for view in views for slot in _slots(view, "weight")}
    found = [_values(name, views) for name in names]
    if not found or not all(found):
        return 0.0
    gradients = [i for view in views for _, items in view.find(Kind.LOCAL_GRAD) for i in items]
    values = max(coarser_eps(items) for items in found)
    return max(values, coarser_eps(gradients) / OWN)


def _values(name: str, views: Iterable[StepView]) -> list[Item]:
    """Return what a loss function returned in both runs, none where one of them lacks it."""
    sides = [
        [i for slot in _slots(view, "value") if slot.name == name for i in view.items[slot]] for view in views
    ]
    return [item for side in sides for item in side] if all(sides) else []


def _slots(view: StepView, name: str) -> list[Slot]:
    return [s for s in view.items if s.kind == Kind.LOSS and s.slot == name and s.phase == "train"]


def _direct(values: Sequence[Item]) -> bool:
    return all(item.entry.meta.op == OF_RECORDED for item in values)
