"""What a parameter copied back from its master differs by from the rounded master, in each run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.masters import COPIED, COPY, spacing
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import coarser_eps, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.tolerance import OWN, PEAK, Unexplained, measure_unexplained
from tensortrace.tracer.types import Kind

ROUNDED = 1.5
"""Units of its last place by which a copy may be off: correct programs round it up, down, or by chance."""


def copies_in(slot: Slot, view: StepView, before: StepView) -> tuple[Item, ...]:
    """Return what a run's passes compute with where a master is copied in one of the two runs.

    A run that updates a module's own parameter copies nothing: it computes with what it updated.
    """
    found = view.items.get(slot, ())
    if found or any(slot._replace(slot=COPY) in held.items for held in (view, before)):
        return found
    model = window_slot(Kind.PARAM, slot.name, "model")
    if slot.slot == COPIED:
        return view.items.get(model, ())
    return view.items.get(model._replace(slot="start"), ()) or before.items.get(model, ())


def copying_error(slot: Slot, pair: StepPair) -> Callable[[], Unexplained | None]:
    """Return how to compute what of a difference the masters that were copied do not explain."""

    def own() -> Unexplained | None:
        after = slot.slot == COPIED
        sides = ((pair.a, pair.before_a), (pair.b, pair.before_b))
        found = [
            _residue(slot, copies_in(slot, view, before), view if after else before) for view, before in sides
        ]
        if found[0] is None or found[1] is None or found[0][0].shape != found[1][0].shape:
            return None
        (error_a, size_a), (error_b, size_b) = found[0], found[1]
        return measure_unexplained([(error_b - error_a, np.fmax(size_a, size_b))])

    return own


def _residue(slot: Slot, copies: tuple[Item, ...], masters: StepView) -> Sides | None:
    """Return copy − master, and the size of which ``judge_own`` allows that many spacings."""
    held = masters.items.get(window_slot(Kind.PARAM, slot.name, "model"), ())
    if not copies or not held:
        return None
    copy, master = replica(copies), replica(held)
    if copy.entry.local_shape != master.entry.local_shape or not _readable(copy, master):
        return None
    eps = coarser_eps((copy,))
    wide, narrow = master.read().astype(np.float64), copy.read().astype(np.float64)
    return narrow - wide, ROUNDED / (PEAK * OWN * eps) * spacing(wide, copy.entry.dtype)


def _readable(*items: Item) -> bool:
    return all(item.source.stored(item.entry) for item in items)
