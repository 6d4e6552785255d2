"""Gradients of activations where one run goes backward several times through a graph, the other once.

A loss may be split into terms with a backward pass each: the gradients of the passes add up to the one of
their sum. The recorder numbers those of further passes after the calls of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.comparison import by_rank
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.types import Kind


def calls_of_pass(slot: Slot, pair: StepPair) -> int:
    """Return how often a module is called, where the runs go backward through its calls unequally often.

    0 where they go backward equally often. Each call's gradients are then those with its own number and with
    that plus a multiple of the number of calls.
    """
    if slot.kind != Kind.ACTIVATION_GRAD or slot.phase != "train":
        return 0
    made = [_calls(slot, view) for view in (pair.a, pair.b)]
    calls = max(len(_calls(slot._replace(kind=Kind.ACTIVATION), view)) for view in (pair.a, pair.b))
    further = any(call >= calls for side in made for call in side)
    return calls if calls and all(made) and made[0] != made[1] and further else 0


def _calls(slot: Slot, view: StepView) -> set[int]:
    return {s.call for s in view.named(slot.kind, slot.name) if s._replace(call=0) == slot._replace(call=0)}


def summed_over_passes(
    slot: Slot,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    pair: StepPair,
    calls: int,
    aligned: Callable[[tuple[Item, ...], tuple[Item, ...]], Assembled],
) -> Assembled:
    """Return the gradients of one call, ``a`` and ``b``, with those of further backward passes added."""
    whole = aligned(a, b)
    left, right = whole.a, whole.b
    for more in _further(slot, a, pair.a, pair, calls):
        left = left + aligned(more, b).a
    for more in _further(slot, b, pair.b, pair, calls):
        right = right + aligned(a, more).b
    return whole._replace(a=left, b=right)


def _further(
    slot: Slot, items: Sequence[Item], view: StepView, pair: StepPair, calls: int
) -> list[tuple[Item, ...]]:
    """Return the gradients of each further backward pass, of the microbatches that ``items`` are of."""
    groups = {pair.group(item.part) for item in items if item.part is not None}
    found = []
    for call in sorted(_calls(slot, view)):
        if call > slot.call and call % calls == slot.call % calls:
            mine = view.items[slot._replace(call=call)]
            found.append(by_rank([i for i in mine if i.part is not None and pair.group(i.part) in groups]))
    return [more for more in found if more]
