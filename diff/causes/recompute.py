"""Activations that backward recomputed to other values than the first pass had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.recompute import AGAIN
from tensortrace.tracer.types import Kind


def differs(case: Case) -> Sequence[Proposal]:
    """Propose that the gradients belong to another forward pass than the loss."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or not slot.slot.endswith(AGAIN) or loaded is None:
        return ()
    wrong = int(np.count_nonzero(loaded.a != loaded.b))
    items = case.origin.comparison.items_b if isinstance(case.origin.comparison, Comparison) else ()
    module = next((item.entry.meta.module for item in items if item.entry.meta.module), None)
    what = f"{module} {slot.name}" if module else slot.name
    text = (
        f"{what} gave {wrong} of {loaded.a.size} other elements when backward recomputed it than in the "
        "first pass: the gradients belong to another forward"
    )
    return (told("recompute.differs", text, wrong, "elements that differ", simplicity=-1),)
