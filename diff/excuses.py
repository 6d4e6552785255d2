"""Tells a defect from a gap: what a run never promised, or lost with a rank, is no divergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tensortrace.diff.align import Alignment
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.plan.comparison import OneSided, StepPlan
from tensortrace.tracer.types import INIT_STEP, Kind

SEEN_LATER = "the run that begins here shows it with its first step, where it is compared"


def excused(
    plan: StepPlan, a: Catalog, b: Catalog, alignment: Alignment, allowed: Sequence[str] = ()
) -> StepPlan:
    """Return a plan in which what one run could not or should not hold is a gap in coverage.

    So is what only one run has if its name, or that of every parameter it tells of, fits an allowed glob.
    """
    step_a, step_b = plan.step, plan.step - alignment.offset
    if plan.step == INIT_STEP:
        step_a, step_b = alignment.before_a, alignment.before_b
    found = []
    for entry in plan.one_sided:
        lacking, step = (b, step_b) if entry.side == "a" else (a, step_a)
        if plan.step == INIT_STEP and _is_seen_later(entry, lacking, step, alignment):
            found.append(replace(entry, reason=SEEN_LATER, diverges=False, counts=False))
        elif entry.diverges and _is_allowed(entry, allowed):
            found.append(replace(entry, diverges=False, counts=False))
        else:
            found.append(_excused(entry, lacking, step) if entry.diverges else entry)
    return StepPlan(plan.step, plan.comparisons, found, plan.notes)


def _is_seen_later(entry: OneSided, lacking: Catalog, step: int, alignment: Alignment) -> bool:
    """Tell whether a run that has only just begun shows a buffer with its first step alone.

    An average of the weights is known once it was updated; in the other run, which is in the middle, it was.
    What the first step leaves of it is compared, and was computed from what it was before.
    """
    if entry.slot.kind is not Kind.BUFFER or step != INIT_STEP or not alignment.offset:
        return False
    first = alignment.steps[0] - (alignment.offset if entry.side == "a" else 0)
    return entry.slot in lacking.view(first).items


def _is_allowed(entry: OneSided, globs: Sequence[str]) -> bool:
    names = entry.names or (entry.slot.name,)
    return all(any(fnmatchcase(name, glob) for glob in globs) for name in names)


def _excused(entry: OneSided, lacking: Catalog, step: int) -> OneSided:
    """Return a divergence as a gap where the run that lacks the boundary has a reason to."""
    expected = lacking.would_hold(entry.slot.kind, entry.slot.name, step)
    return entry if expected else replace(entry, diverges=False)
