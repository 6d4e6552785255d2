"""Whether the losses that were recognised make all of what a backward pass started from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.catalog import Item, Part, StepView
from tensortrace.tracer.types import Kind

APART = 1e-3
"""Relative difference from which a sum of losses is another number than the one that backward began with."""


def has_unknown_loss(view: StepView, other: StepView) -> bool:
    """Tell whether a step has a backward pass that began with a loss, or a term of one, not recognised.

    Or with one that goes by the name of another function than in the other run, and is as great a part of
    the objective there.
    """
    found = {slot.name for slot, _ in view.find(Kind.LOSS, phase="train")}
    if "backward" not in found or found == {"backward"}:
        return "backward" in found
    own, others = _made_of(view), _made_of(other)
    if own is None:
        return False
    if any(abs(own.roots[p] - own.known(p)) > APART * (abs(own.roots[p]) + own.size(p)) for p in own.roots):
        return True
    if others is None or not own.names - others.names or not others.names - own.names:
        return False
    mine, theirs = own.share(own.names - others.names), others.share(others.names - own.names)
    return abs(mine - theirs) <= APART


def weighed_sum(view: StepView, name: str, parts: Mapping[Part, float]) -> float | None:
    """Return what the terms of a loss weigh together, each part's divided by a number; None if unknown."""
    made = _made_of(view)
    if made is None or any((part, name) not in made.terms for part in parts):
        return None
    return sum(made.terms[part, name] / by for part, by in parts.items())


@dataclass(frozen=True)
class KnownPart:
    """What the recognised losses of one part come to by their weights, and the sum of their magnitudes."""

    value: float
    size: float


def known_parts(view: StepView) -> dict[Part, KnownPart]:
    """Return that of each part that backward went through; empty where a loss's weights do not tell it."""
    made = _made_of(view)
    return {} if made is None else {part: KnownPart(made.known(part), made.size(part)) for part in made.roots}


@dataclass
class _Objective:
    """What backward began with in each part, and what recognised losses times their weights come to."""

    roots: dict[Part, float]
    terms: dict[tuple[Part, str], float]

    @property
    def names(self) -> set[str]:
        """The losses that any gradient came through."""
        return {name for _, name in self.terms}

    def known(self, part: Part) -> float:
        """Return what the recognised losses of a part come to."""
        return sum(value for (at, _), value in self.terms.items() if at == part)

    def size(self, part: Part) -> float:
        """Return the sum of their magnitudes."""
        return sum(abs(value) for (at, _), value in self.terms.items() if at == part)

    def share(self, names: set[str]) -> float:
        """Return which part of all terms some are, whatever the scale."""
        whole = sum(abs(value) for value in self.terms.values())
        mine = sum(value for (_, name), value in self.terms.items() if name in names)
        return mine / whole if whole else 0.0


def _made_of(view: StepView) -> _Objective | None:
    """Return what a step's objective is made of; None where a loss has no weights that tell it.

    A call that no gradient came through is no term of it.
    """
    roots: dict[Part, float] = defaultdict(float)
    calls: dict[tuple[Part, str, int], dict[str, Item]] = defaultdict(dict)
    for slot, items in view.find(Kind.LOSS, phase="train"):
        for item in items:
            if item.part is None or not item.source.stored(item.entry):
                continue
            if slot.name != "backward":
                calls[item.part, slot.name, slot.call][slot.slot] = item
            elif item.entry.local_shape == ():
                roots[item.part] += float(item.read())
    weighed = {part for (part, _, _), slots in calls.items() if "weight" in slots}
    terms: dict[tuple[Part, str], float] = defaultdict(float)
    for (part, name, _), slots in calls.items():
        if "weight" in slots:
            value = _value(slots)
            if value is None:
                return None
            terms[part, name] += value
        elif part not in weighed:
            return None
    return _Objective(roots, terms)


def _value(slots: Mapping[str, Item]) -> float | None:
    """Return the sum of a call's terms times their weights; None where it is not known."""
    weight = slots["weight"].read()
    if "value" in slots and weight.shape and slots["value"].entry.local_shape == weight.shape:
        weighing = weight != 0  # what is masked may be anything
        return float(np.vdot(weight[weighing], slots["value"].read()[weighing].astype(np.float64)))
    weights = np.unique(weight)
    weights = weights[weights != 0] if len(weights) > 1 else weights  # what is masked is in no sum
    if "sum" not in slots or len(weights) != 1 or slots["sum"].entry.local_shape != ():
        return None
    return float(weights[0]) * float(slots["sum"].read())
