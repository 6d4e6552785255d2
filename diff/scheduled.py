"""What a step's learning-rate schedule says: the position at which it stands, or the rate that it sets."""

from __future__ import annotations

from tensortrace.diff.catalog import StepView
from tensortrace.diff.plan.comparison import replica
from tensortrace.tracer.types import Kind


def scheduled(view: StepView, name: str) -> float | None:
    """Return a value of the first schedule that has one of this name; None where none has."""
    for slot, items in sorted(view.find(Kind.SCHEDULE)):
        if slot.slot == name:
            return float(replica(items).read())
    return None
