"""Gradients that are left over when a window begins and differ without any effect."""

from __future__ import annotations

from tensortrace.diff.execute import Execution
from tensortrace.diff.kinds import RUNGS
from tensortrace.diff.outcome import Outcome
from tensortrace.tracer.types import Kind

OVERWRITTEN = "gradients left over between steps differ and are overwritten: nothing comes of them"


def is_overwritten(outcome: Outcome, execution: Execution) -> bool:
    """Tell whether a gradient left over differs and the same parameter's later gradients of the step agree.

    A program that computes its own gradients may assign them instead of adding to what is there.
    """
    slot, step = outcome.node.slot, outcome.node.step
    if (slot.kind, slot.slot) != (Kind.LOCAL_GRAD, "start"):
        return False
    later = [
        error
        for node, error in execution.errors.items()
        if (node.step, node.slot.name) == (step, slot.name) and node.slot.kind in RUNGS
    ]
    return bool(later) and not any(error.diverges for error in later)
