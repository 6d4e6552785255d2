"""Tokens that were sent to other experts than in the reference."""

from __future__ import annotations

from collections.abc import Sequence

from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.dispatched import whose_tokens
from tensortrace.tracer.types import Kind


def of_another(case: Case) -> Sequence[Proposal]:
    """Propose that experts changed places: one was given the tokens of another."""
    slot = case.origin.node.slot
    if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("in") or slot.phase != "train":
        return ()
    found = {}
    for outcome in case.siblings:
        entry = outcome.comparison
        if isinstance(entry, Comparison) and entry.slot.kind == Kind.ACTIVATION:
            found[entry.slot.name] = whose_tokens(entry.slot, entry.items_a, entry.items_b, case.pair)
    moved = [f"{name} is given a's {other}" for name, other in found.items() if other]
    if not found.get(slot.name):
        return ()
    text = f"tokens of experts are permuted in b: {'; '.join(moved[:4])}{'; …' if len(moved) > 4 else ''}"
    count = "experts that are given the tokens of another"
    return (told("layout.permuted_blocks", text, len(moved), count, simplicity=-1),)
