"""Plans which samples a step holds: rows that only one run was given, ranks that go through other passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.comparison import OneSided, StepPlan, by_rank
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.types import ROOT, Kind

ROWS = Slot("train", Kind.INPUT, ROOT, "rows", 0)
"""Stands for which rows a step holds: one-sided where a row of one run is none of the other's."""


def plan_rows(pair: StepPair, plan: StepPlan) -> None:
    """Add rows that only one run was given, where both recorded their rows."""
    pairing = pair.pairing
    if not pair.batch_a.rows or not pair.batch_b.rows:
        return
    calls = [_calls_of_root(view) for view in (pair.a, pair.b)]
    for side, view, left in (("a", pair.a, pairing.only_a), ("b", pair.b, pairing.only_b)):
        if left and calls[0] != calls[1]:
            text = f"the model is called {calls[0]} times a microbatch in a, {calls[1]} in b"
            other: Literal["a", "b"] = "a" if side == "a" else "b"
            plan.one_sided.append(
                OneSided(other, ROWS, None, (), f"{text}: rows of further calls don't meet")
            )
        elif left:
            parts = {row.part for row in left}
            items = [i for _, found in view.find(Kind.INPUT) for i in found if i.part in parts]
            text = f"{len(left)} rows were given only to {side}"
            one: Literal["a", "b"] = "a" if side == "a" else "b"
            forms = _forms(
                i for _, found in (pair.b if side == "a" else pair.a).find(Kind.INPUT) for i in found
            )
            if items and forms and forms.isdisjoint(_forms(items)):  # as stages of a pipeline are
                text = f"ranks of {side} are given tensors of another form than those of the other run"
                plan.one_sided.append(OneSided(one, ROWS, None, by_rank(items), text))
                continue
            plan.one_sided.append(OneSided(one, ROWS, None, by_rank(items), text, diverges=True))


def _forms(items: Iterable[Item]) -> set[tuple[int, bool]]:
    """Return of how many dimensions tensors are, and whether they are of floating point."""
    return {(len(item.entry.local_shape), "float" in item.entry.dtype) for item in items}


def _calls_of_root(view: StepView) -> int:
    """Return how often the model is called within a microbatch."""
    found = [s.call for s, _ in view.find(Kind.INPUT, phase="train") if s.name == ROOT]
    return max(found, default=-1) + 1


def plan_lags(pair: StepPair, plan: StepPlan) -> None:
    """Add ranks whose window holds other microbatches than those of the ranks that they work with."""
    if lags(pair.a):
        return
    for cell, ranks in lags(pair.b).items():
        counts = sorted(pair.b.passes_of(cell).items())
        shown = ", ".join(f"{count} on rank {rank}" for rank, count in counts[:8])
        text = f"ranks that work on the same rows count other numbers of microbatches in this step: {shown}"
        items = [
            item for _, found in pair.b.find(Kind.ACTIVATION) for item in found if item.source.rank in ranks
        ]
        # all that is summed over the window is another sum: its first pass is where to begin to look
        plan.one_sided.append(OneSided("b", ROWS, 0, by_rank(items)[:1], text, diverges=True))


def lags(view: StepView) -> dict[int, tuple[int, ...]]:
    """Return by data cell the ranks whose window is longer than the shortest of their cell."""
    found: dict[int, tuple[int, ...]] = {}
    for cell in {part.rank for part in view.parts}:
        counts = view.passes_of(cell)
        longer = tuple(sorted(rank for rank, count in counts.items() if count > min(counts.values())))
        if longer:
            found[cell] = longer
    return found
