"""Plans the comparison of what a token weighs in the gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.objective import has_unknown_loss
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan, by_rank
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.precision import eps_of_weights
from tensortrace.diff.scale import CLOSE, Term, TokenWeights
from tensortrace.tracer.types import Kind

WHOLE_ON_RANKS = "every rank of one run computes the loss of all ranks' rows, and they weigh it differently"

Ref = tuple[int | None, Slot]

UNKNOWN_LOSS = "the other run computes its loss in a way that is not recognised: its gradients are compared"

INSIDE = (
    "one run gives the loss what its terms weigh, the other multiplies by it: the sums of both are compared"
)


def plan_weights(pair: StepPair, plan: StepPlan) -> None:
    """Add the token weights to the plan, by microbatch where both runs split the batch alike."""
    names = sorted({slot.name for view in (pair.a, pair.b) for slot in _weights(view)})
    rows: dict[int | None, list[int]] = defaultdict(list)
    eps, noise = eps_of_weights(pair), pair.noise_of_weights
    for number, (x, _) in enumerate(pair.pairing.pairs):
        rows[pair.group(x.part)].append(number)
    for group, numbers in rows.items():
        load, counts = _loader(pair, numbers), _counts(pair, group)
        a, b = (_items(view, group, pair) for view in (pair.a, pair.b))
        views = (pair.b, pair.a) if a else (pair.a, pair.b)
        if not (a and b) and has_unknown_loss(*views):
            slots = [Slot("train", Kind.LOSS, name, "weight", 0) for name in names]
            side: Literal["a", "b"] = "a" if a else "b"
            plan.one_sided += [OneSided(side, s, group, a or b, UNKNOWN_LOSS, counts=False) for s in slots]
            continue
        if pair.broken:
            slot = Slot("train", Kind.LOSS, names[0], "weight", 0)
            broken = _loader_of_broken(pair, numbers)
            plan.comparisons.append(Comparison(slot, group, broken, a, b, counts, eps=eps, noise=noise))
            continue
        if pair.weighed_inside:
            slot = Slot("train", Kind.LOSS, names[0], "weight", 0)
            plan.one_sided.append(OneSided("both", slot, group, (*a, *b), INSIDE, counts=False))
            continue
        if pair.effective_weights is None and pair.effective_tokens is None and pair.effective_terms:
            for name, call in pair.terms:
                slot = Slot("train", Kind.LOSS, name, "weight", call)
                of_term = _loader_of_term(pair, numbers, (name, call))
                plan.comparisons.append(Comparison(slot, group, of_term, a, b, counts, eps=eps, noise=noise))
            others = {*names} - {name for name, _ in pair.terms}
            plan.one_sided += _unknown(sorted(others), group, a, b, pair)
            continue
        if _unweighed(pair) and not any(all(_have(name, pair)) for name in names):
            plan.one_sided += _unknown(names, group, a, b, pair)
            continue
        for name in names:  # one weight per part stands for all of its terms
            slot = Slot("train", Kind.LOSS, name, "weight", 0)
            parents = counts if name == names[0] else ((group, slot._replace(name=names[0])),)
            plan.comparisons.append(Comparison(slot, group, load, a, b, parents, eps=eps, noise=noise))


def _unknown(
    names: Sequence[str], group: int | None, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair
) -> list[OneSided]:
    """Return the weights of losses that only one run computes."""
    found = []
    for name in names:
        side: Literal["a", "b"] = "a" if _have(name, pair)[0] else "b"
        slot = Slot("train", Kind.LOSS, name, "weight", 0)
        found.append(OneSided(side, slot, group, a if side == "a" else b, UNKNOWN_LOSS, counts=False))
    return found


def _have(name: str, pair: StepPair) -> tuple[bool, bool]:
    """Tell of each run whether it weighs the terms of a loss."""
    a, b = (any(slot.name == name for slot in _weights(view)) for view in (pair.a, pair.b))
    return a, b


def _unweighed(pair: StepPair) -> bool:
    """Tell whether nothing says by what the terms of both runs' losses weigh in their gradients."""
    return pair.effective_weights is None and pair.effective_tokens is None and not pair.effective_terms


def weight_refs(pair: StepPair) -> tuple[Ref, ...]:
    """Return every weight of the step: what a gradient depends on that sums over the batch."""
    groups = {pair.group(x.part) for x, _ in pair.pairing.pairs}
    slots = dict.fromkeys(slot._replace(call=0) for slot in _weights(pair.b))
    return tuple((group, slot) for slot in slots for group in groups)


def _weights(view: StepView) -> list[Slot]:
    return [slot for slot, _ in view.find(Kind.LOSS, phase="train") if slot.slot == "weight"]


def _items(view: StepView, group: int | None, pair: StepPair) -> tuple[Item, ...]:
    items = (i for slot in _weights(view) for i in view.items[slot])
    return by_rank([i for i in items if i.part is not None and pair.group(i.part) == group])


def _loader(pair: StepPair, numbers: Sequence[int]) -> Callable[[], Assembled]:
    """Return a loader of weights by row; by token, where rows don't have one weight or not the same zeros."""

    def load() -> Assembled:
        if _whole_but_unlike(pair):
            raise NotComparable(WHOLE_ON_RANKS)
        owners = tuple(pair.pairing.pairs[n][1] for n in numbers)
        by_row, by_token = pair.effective_weights, pair.effective_tokens
        if by_token is not None and (by_row is None or not _same_zeros(by_token)):
            a, b = ([side[n] for n in numbers] for side in by_token)
            return Assembled(np.concatenate(a), np.concatenate(b), owners, tuple(map(len, a)))
        if by_row is None:
            raise NotComparable("scale not observed: a loss has no single weight for its tokens")
        left, right = (side[list(numbers)] for side in by_row)
        return Assembled(left, right, owners, (1,) * len(owners))

    return load


def _loader_of_broken(pair: StepPair, numbers: Sequence[int]) -> Callable[[], Assembled]:
    """Return a loader of weights by row as they were recorded, where one run has some that aren't finite."""

    def load() -> Assembled:
        rows = [pair.pairing.pairs[n] for n in numbers]
        left = [_recorded(pair.weights_a, x.part) for x, _ in rows]
        right = [_recorded(pair.weights_b, y.part) for _, y in rows]
        return Assembled(np.array(left), np.array(right), tuple(y for _, y in rows), (1,) * len(rows))

    return load


def _recorded(weights: TokenWeights, part: Part) -> float:
    weight = weights.broken.get(part, weights.weight.get(part))
    if weight is None:
        raise NotComparable("scale not observed: a loss has no single weight for its tokens")
    return weight


def _loader_of_term(pair: StepPair, numbers: Sequence[int], term: Term) -> Callable[[], Assembled]:
    """Return a loader of one term's weights, by row or by token."""

    def load() -> Assembled:
        assert pair.effective_terms is not None  # it was planned so
        if _whole_but_unlike(pair):
            raise NotComparable(WHOLE_ON_RANKS)
        owners = tuple(pair.pairing.pairs[n][1] for n in numbers)
        a, b = ([side[n] for n in numbers] for side in pair.effective_terms[term])
        return Assembled(np.concatenate(a), np.concatenate(b), owners, tuple(map(len, a)))

    return load


def _whole_but_unlike(pair: StepPair) -> bool:
    """Tell whether ranks compute one loss of all rows and weigh it differently: a row has no one weight."""
    if not pair.whole_on_ranks:
        return False
    weights = pair.weights_a if pair.whole_on_ranks == "a" else pair.weights_b
    found = list(weights.weight.values())
    return None not in found and not np.allclose([w or 0.0 for w in found], found[0] or 0.0, CLOSE, 0.0)


def _same_zeros(sides: tuple[list[np.ndarray], list[np.ndarray]]) -> bool:
    return all(np.array_equal(a != 0, b != 0) for a, b in zip(*sides, strict=True))


def _counts(pair: StepPair, group: int | None) -> tuple[Ref, ...]:
    """Return the counts of valid tokens, which weights are made of, and what else they were computed from.

    What a token weighs may depend on the scores, where an objective is no sum over tokens.
    """
    found: dict[Ref, None] = {}
    for view in (pair.a, pair.b):
        for slot, items in view.find(Kind.LOSS, phase="train"):
            mine = [i for i in items if i.part is not None and pair.group(i.part) == group]
            if slot.slot == "count" and mine:
                found[(group, slot._replace(call=0))] = None
            if slot.slot == "weight":
                sources = [source for item in mine for source in view.producers(item)]
                found |= {(pair.group(part), source): None for source, part in sources}
    return tuple(found)
