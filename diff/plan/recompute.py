"""Plans the comparison of what backward recomputed with what the first pass had computed, within ``b``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Recomputed, Slot, StepView
from tensortrace.diff.compare import is_exact
from tensortrace.diff.plan.comparison import Comparison, StepPlan
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import Streamed, one, paired
from tensortrace.tracer.types import Kind

AGAIN = " (recomputed)"
"""What is appended to the slot of an activation that activation checkpointing computed a second time."""

Ref = tuple[int | None, Slot]


def plan_recomputed(pair: StepPair, plan: StepPlan) -> None:
    """Add a comparison for each activation of ``b`` whose recompute is not the first pass, bit for bit.

    The gradients depend on it. Where ``a`` recomputes other values too, nothing is compared: the programs
    agree on what they do.
    """
    excused = {other.slot for other in _differing(pair.a)}
    found: dict[Ref, None] = {}
    by_event: dict[tuple[int, int], Ref] = {}
    for other in _differing(pair.b):
        if other.slot in excused or other.first.part is None:
            continue
        microbatch = pair.group(other.first.part)
        ref = (microbatch, other.slot._replace(slot=other.slot.slot + AGAIN))
        [(rank, entry)] = other.again.members
        by_event[(rank, entry.event)] = ref
        if ref not in found:
            found[ref] = None
            given = (by_event.get((rank, event)) for event in entry.producers)
            parents = ((microbatch, other.slot), *(parent for parent in given if parent))
            plan.comparisons.append(_comparison(ref, other, parents))
    _let_gradients_depend(list(found), plan)


def _comparison(ref: Ref, other: Recomputed, parents: tuple[Ref, ...]) -> Comparison:
    return Comparison(
        ref[1], ref[0], partial(_load, other.first, other.again), (other.first,), (other.again,), parents,
        exact=is_exact(other.first.entry.dtype), text="recomputed in backward, against b's own first pass",
    )  # fmt: skip


def _load(first: Item, again: Item) -> Assembled | Streamed:
    if first.bare or again.bare:  # of one rank and pass: its samples lie in one order
        return paired(one(first), one(again))
    return Assembled(first.read(), again.read())


def _differing(view: StepView) -> list[Recomputed]:
    return [
        other
        for other in view.recomputed
        if other.slot.kind == Kind.ACTIVATION and other.first.entry.digest != other.again.entry.digest
    ]


def _let_gradients_depend(refs: list[Ref], plan: StepPlan) -> None:
    """Make the gradients that are computed from recomputed values depend on them."""
    by_module: dict[str, list[Ref]] = defaultdict(list)
    for ref in refs:
        by_module[ref[1].name].append(ref)
    for number, entry in enumerate(plan.comparisons):
        kind, name = entry.slot.kind, entry.slot.name
        owner = name.rpartition(".")[0] if kind == Kind.LOCAL_GRAD else name
        if kind in (Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD) and owner in by_module:
            every = None in (entry.microbatch, by_module[owner][0][0])
            more = [ref for ref in by_module[owner] if every or ref[0] == entry.microbatch]
            plan.comparisons[number] = replace(entry, parents=(*entry.parents, *more))
