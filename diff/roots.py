"""Whether runs part in the objective itself: in the scalar that backward starts from.

A term of an objective that is no recorded loss (a divergence, a penalty, an entropy) and its coefficient show
in that scalar first. It is no boundary that must agree, since programs add to it what has no gradient. Where
gradients diverge although all that they were computed from agrees, it tells whether their objectives do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Part, Slot
from tensortrace.diff.causality import Node
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.execute import Execution
from tensortrace.diff.kinds import GRADIENTS
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import Comparison, coarser_eps
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.tolerance import Error, Measured, judge_model, measure_peak
from tensortrace.tracer.types import Kind

UNKNOWN_TERMS = 64.0
"""Units of round-off allowed where no recorded loss tells how great the terms are that a value sums."""

_FORWARD = frozenset({Kind.ACTIVATION, Kind.LOSS})


def loss_first(origins: Sequence[Outcome]) -> list[Outcome]:
    """Return origins with those of losses before the gradients of the same passes.

    What a root returns may be used inside it, too: its gradient is computed from more than a loss.
    """
    if not origins or origins[0].node.slot.kind not in GRADIENTS:
        return list(origins)
    step, microbatch, _ = origins[0].node
    losses = [
        o
        for o in origins
        if o.node.slot.kind == Kind.LOSS and o.node.step == step and o.node.microbatch == microbatch
    ]
    told = {id(o) for o in losses}
    return [*losses, *(o for o in origins if id(o) not in told)]


def objective(origin: Outcome, execution: Execution) -> Outcome | None:
    """Return the first value that backward starts from and that differs, of a step whose gradients diverge.

    Only runs of one scheme start from the same values. They are brought to one scale as gradients are. None
    where they agree to what round-off and the errors of the forward pass may make of them.
    """
    pair, node = origin.pair, origin.node
    if pair is None or node.slot.kind not in GRADIENTS or not pair.same_scheme or pair.overflowed:
        return None
    if not isinstance(origin.comparison, Comparison) or pair.whole_on_ranks:
        return None
    if any(_agrees(parent, execution) for parent in execution.graph.parents(node)):
        return None
    if any(error.diverges for _, error in _forward(execution, node.step, node.microbatch)):
        return None  # as behind a declared difference: other values make another objective
    for slot, microbatch, a, b in _roots(pair, node.microbatch):
        values = np.float64(sum(i.read() for i in a)), np.float64(sum(i.read() / _scale(i, pair) for i in b))
        if not all(math.isfinite(v) for v in values):
            continue
        loaded = Assembled(np.asarray(values[0]), np.asarray(values[1]))
        inherited = Error(rel=_of_forward(execution, node.step, microbatch))
        eps = coarser_eps((*a, *b))
        metrics = measure_blocks(loaded.shape, loaded.blocks(), eps=eps or EPS["float64"])
        terms = max(sum(_terms(pair, side, i) for i in items) for side, items in (("a", a), ("b", b)))
        peak = measure_peak(loaded.blocks(), metrics, terms)
        noise = 0.0 if terms else UNKNOWN_TERMS * eps
        judgement = judge_model(Measured(metrics, peak, terms), eps, [inherited], noise=noise)
        if judgement.ratio > 1:
            entry = Comparison(slot, microbatch, partial(_same, loaded), a, b)
            text = (
                f"backward starts from {values[1]:.9g} in b, {values[0]:.9g} in a, though the losses "
                "recorded before it agree: another term of the objective differs, or its coefficient"
            )
            at = Node(node.step, microbatch, slot)
            return Outcome(at, entry, "origin", metrics, judgement, text, loaded, pair, shape=loaded.shape)
    return None


def _agrees(parent: Node, execution: Execution) -> bool:
    """Tell whether a gradient that another one is computed from agrees: then the objective does, too."""
    error = execution.errors.get(parent)
    return parent.slot.kind == Kind.ACTIVATION_GRAD and error is not None and not error.diverges


def _same(loaded: Assembled) -> Assembled:
    return loaded


def _roots(
    pair: StepPair, microbatch: int | None
) -> Iterator[tuple[Slot, int | None, tuple[Item, ...], tuple[Item, ...]]]:
    """Yield what each backward pass of both runs starts from, those of one microbatch where one is given.

    In the order in which they ran, and part by part; where the runs give their parts other rows, what all
    parts start from, which is one sum. Nothing where one run goes backward more often.
    """
    found: list[tuple[tuple[int, int], Slot, tuple[Item, ...], tuple[Item, ...]]] = []
    sides = [
        {slot: items for slot, items in view.find(Kind.LOSS, phase="train") if slot.name == "backward"}
        for view in (pair.a, pair.b)
    ]
    if sides[0].keys() != sides[1].keys():
        return
    for slot, items in sides[0].items():
        parts = [{i.part: i for i in side if i.part is not None} for side in (items, sides[1][slot])]
        if parts[0].keys() != parts[1].keys() or not parts[0]:
            continue
        groups: list[tuple[Part, ...]] = [tuple(sorted(parts[0]))]
        if all(x.part == y.part for x, y in pair.pairing.pairs):
            groups = [(part,) for part in parts[0]]
        for group in groups:
            left, right = (tuple(side[part] for part in group) for side in parts)
            numbers = {part.number for part in group}
            if microbatch is not None and numbers != {microbatch}:
                continue
            if all(i.entry.local_shape == () and i.source.stored(i.entry) for i in (*left, *right)):
                found.append(((min(numbers), left[0].entry.event), slot, left, right))
    for _, slot, left, right in sorted(found, key=lambda f: f[0]):
        grouped = {pair.group(item.part) for item in left if item.part}
        yield slot, grouped.pop() if len(grouped) == 1 else None, left, right


def _scale(item: Item, pair: StepPair) -> float:
    """Return by what a part's gradients of ``b`` are divided: 1 where nothing tells it."""
    return (pair.scale.by_part.get(item.part) if item.part else None) or 1.0


def _terms(pair: StepPair, side: str, item: Item) -> float:
    """Return the sum of the magnitudes of the recorded losses that a part's value is made of."""
    view, weights = (pair.a, pair.weights_a) if side == "a" else (pair.b, pair.weights_b)
    weight = weights.weight.get(item.part) if item.part else None
    sums = [
        abs(float(i.read()))
        for slot, items in view.find(Kind.LOSS, phase="train")
        for i in items
        if slot.slot == "sum" and i.part == item.part and i.source.stored(i.entry)
    ]
    scale = _scale(item, pair) if side == "b" else 1.0
    return sum(sums) * abs(weight / scale) if weight else 0.0


def _of_forward(execution: Execution, step: int, microbatch: int | None) -> float:
    """Return the greatest relative error of what forward passes computed."""
    known = (error.rel for _, error in _forward(execution, step, microbatch) if math.isfinite(error.rel))
    return max(known, default=0.0)


def _forward(execution: Execution, step: int, microbatch: int | None) -> Iterator[tuple[Node, Error]]:
    """Yield the errors of what one pass, or every pass of a step, computed forward."""
    for node, error in execution.errors.items():
        if node.step == step and node.slot.kind in _FORWARD and microbatch in (None, node.microbatch):
            yield node, error
