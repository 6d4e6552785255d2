"""Whether the losses that were recognised make all of what a backward pass started from."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tensortrace.diff.catalog import Item, Part, StepView
from tensortrace.tracer.types import Kind

APART = 1e-3
"""Relative difference from which a sum of losses is another number than the one that backward began with."""


def has_unknown_loss(view: StepView) -> bool:
    """Tell whether a step has a backward pass that began with a loss, or a term of one, not recognised."""
    found = {slot.name for slot, _ in view.find(Kind.LOSS, phase="train")}
    return found == {"backward"} or ("backward" in found and _has_unknown_term(view))


def _has_unknown_term(view: StepView) -> bool:
    """Tell whether, in some part, recognised losses times their weights are not what backward began with.

    Where a loss has no single weight that is not known, and false.
    """
    roots: dict[Part, float] = defaultdict(float)
    terms: dict[tuple[Part, str, int], dict[str, Item]] = defaultdict(dict)
    for slot, items in view.find(Kind.LOSS, phase="train"):
        for item in items:
            if item.part is None or not item.source.stored(item.entry):
                continue
            if slot.name != "backward":
                terms[item.part, slot.name, slot.call][slot.slot] = item
            elif item.entry.local_shape == ():
                roots[item.part] += float(item.read())
    known, sizes = defaultdict[Part, float](float), defaultdict[Part, float](float)
    for (part, _, _), slots in terms.items():
        if "sum" not in slots or "weight" not in slots:
            return False
        weights = np.unique(slots["weight"].read())
        weights = weights[weights != 0] if len(weights) > 1 else weights  # what is masked is in no sum
        if len(weights) != 1 or slots["sum"].entry.local_shape != ():
            return False
        value = float(weights[0]) * float(slots["sum"].read())
        known[part] += value
        sizes[part] += abs(value)
    return any(abs(roots[part] - known[part]) > APART * (abs(roots[part]) + sizes[part]) for part in roots)
