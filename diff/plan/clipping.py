"""Plans what follows from clipping by code of the programs' own: one wrong gradient scales all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Slot
from tensortrace.diff.coefficient import is_torn, odd_names
from tensortrace.diff.plan.comparison import Comparison, StepPlan
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import Streamed, paired
from tensortrace.tracer.types import Kind


def plan_coefficients(last: Mapping[str, Slot], pair: StepPair, plan: StepPlan) -> None:
    """Let consumed gradients follow those that their coefficient was computed from.

    ``last`` has the rung before of each parameter. A gradient that is scaled otherwise than the others is
    compared without what all are scaled by: it is no effect of the coefficient but may be the reason for it.
    """
    a, b = pair.gradients_a, pair.gradients_b
    if not (a.shared and b.shared):
        return
    clipped = {n: c for n, c in enumerate(plan.comparisons) if _is_consumed(c) and c.slot.name in a.shared}
    names = [c.slot.name for c in clipped.values()]
    torn, strange = is_torn(names, b), odd_names(names, a, b)
    odd = [c.slot for c in clipped.values() if c.slot.name in strange]
    leads = tuple((None, slot) for slot in (*last.values(), *odd))
    for number, entry in clipped.items():
        if entry.slot in odd:
            load = entry.load if torn else _loader(entry.slot.name, pair)
            plan.comparisons[number] = replace(entry, load=load)
        else:
            plan.comparisons[number] = replace(entry, follows=leads)


def _is_consumed(entry: Comparison) -> bool:
    return entry.slot.kind == Kind.CLIPPED_GRAD and entry.slot.slot == "grad"


def _loader(name: str, pair: StepPair) -> Callable[[], Assembled | Streamed]:
    def load() -> Assembled | Streamed:
        x, y = (g.unclipped_value(name) for g in (pair.gradients_a, pair.gradients_b))
        if x is None or y is None:
            raise NotComparable("nothing tells the gradient before clipping")
        return paired(x, y)

    return load
