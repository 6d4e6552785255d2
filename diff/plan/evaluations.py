"""Which passes an optimizer made within its update, and what its state is judged by then.

An optimizer that evaluates the model several times in one step (LBFGS, others that take a closure) moves
the parameters in between, which nothing records: a further evaluation depends on the settings of the update
and on the gradients of the evaluation before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.update import has_formula
from tensortrace.tracer.types import Kind

AMPLIFIED = 2.0**-13
"""What a quasi-Newton step may make of round-off in float32: 1024 units, relative.

It divides differences of nearly equal gradients by each other; in correct runs some ten units come out of
each evaluation.
"""


def further_evaluations(view: StepView) -> frozenset[int]:
    """Return the microbatches that an optimizer of no known formula evaluated after its step's first."""
    began: dict[int, int] = {}
    for slot, items in view.find(Kind.SCHEDULE):
        if ".group." in slot.name and not all(has_formula(i.entry.meta.optimizer or "") for i in items):
            for rank, entry in (member for item in items for member in item.members):
                began[rank] = min(entry.event, began.get(rank, entry.event))
    if not began:
        return frozenset()
    found: set[int] = set()
    for _, items in view.find(Kind.ACTIVATION, phase="train"):
        for item in items:
            if item.part is not None and item.part.number not in found:
                if any(entry.event > began.get(rank, entry.event) for rank, entry in item.members):
                    found.add(item.part.number)
    return frozenset(found - {0})


def settings(view: StepView) -> list[Slot]:
    """Return the slots of what an update reads from its parameter groups."""
    return [slot for slot, _ in view.find(Kind.SCHEDULE) if ".group." in slot.name]


def is_own_loss(items: Sequence[Item], view: StepView) -> bool:
    """Tell whether a number of an optimizer's state is a loss of each rank, and not one for all.

    What a closure returns is a rank's own: with its part of the batch it is no replica.
    """
    if len({item.entry.digest for item in items}) < 2 or any(item.entry.local_shape for item in items):
        return False
    losses: set[tuple[int, float]] = set()
    for slot, held in view.find(Kind.LOSS):
        if slot.slot == "value":
            losses |= {(i.source.rank, float(i.read())) for i in held if _is_number(i)}
    return all(_is_number(item) and (item.source.rank, float(item.read())) in losses for item in items)


def _is_number(item: Item) -> bool:
    return item.entry.local_shape == () and item.source.stored(item.entry)


def size_of_list(slot: Slot, view: StepView) -> float:
    """Return the norm of the list that a number of the state is an entry of; 0 for what is no such number.

    Its entries come from one recursion, whose later terms cancel: they err by what the greatest one does.
    """
    head, _, number = slot.slot.rpartition(".")
    if not head or not number.isdigit():
        return 0.0
    beside = (s for s in view.named(slot.kind, slot.name) if s.slot.rpartition(".")[0] == head)
    numbers = [view.items[s][0] for s in beside]
    return math.sqrt(sum(_square(item) for item in numbers if item.entry.local_shape == ()))


def _square(item: Item) -> float:
    value = float(item.read())
    return value * value if math.isfinite(value) else 0.0
