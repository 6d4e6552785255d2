"""Parameters that a program keeps in one flat tensor, which an optimizer updates whole or by shards.

Frameworks copy gradients into it and parameters back out of it by code of their own. Each parameter is a
slice of it, found by its values; its gradient is made of all of theirs, at the spacing of the coarsest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from tensortrace.diff.catalog import Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.masters import spacing
from tensortrace.diff.plan.comparison import StepPair, StepPlan, coarser_eps, replica
from tensortrace.diff.plan.copies import ROUNDED
from tensortrace.diff.plan.gradients import window_slot
from tensortrace.diff.stream import one
from tensortrace.diff.tolerance import OWN, PEAK
from tensortrace.tracer.types import Kind

_MOST = 1 << 28
"""Elements of a flat tensor beyond which none is sought in it."""

_CANDIDATES = 4096
"""Places at which a slice may begin that are tried."""

_RUNGS = (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD)


def relate_flat(pair: StepPair, plan: StepPlan) -> None:
    """Relate flat parameters to those that are slices of them, in the comparisons of one step."""
    flat, slices = _flat(pair.a) & _flat(pair.b), _slices(pair.a) & _slices(pair.b)
    if not flat or not slices:
        return
    locals_of = tuple(window_slot(Kind.LOCAL_GRAD, name, "grad") for name in sorted(slices))
    items = [item for view in (pair.a, pair.b) for slot in locals_of for item in view.items.get(slot, ())]
    items += [
        item
        for view in (pair.a, pair.b)
        for slot, found in view.find(Kind.LOCAL_GRAD)
        if slot.name in slices
        for item in found
    ]
    eps = coarser_eps(items)
    gradients = tuple((None, slot) for slot in locals_of)
    before = tuple((None, window_slot(Kind.PARAM, name, "model")) for name in sorted(flat))
    for number, entry in enumerate(plan.comparisons):
        slot = entry.slot
        if slot.kind in _RUNGS and slot.name in flat and slot.slot == "grad":
            related = replace(entry, parents=(*entry.parents, *gradients), eps=max(entry.eps, eps))
        elif slot.kind == Kind.PARAM and slot.slot == "start" and slot.name in slices:
            own = _slicing_error(slot, flat, pair)
            related = replace(entry, earlier=(*entry.earlier, *before), own=own)
        else:
            continue
        plan.comparisons[number] = related


def _members(view: StepView) -> set[str]:
    return {n for _, items in view.find(Kind.SCHEDULE) for item in items for n in item.entry.meta.members}


def _trained(view: StepView) -> set[str]:
    return {slot.name for slot, _ in view.find(Kind.LOCAL_GRAD) if slot.slot == "grad"}


def _flat(view: StepView) -> set[str]:
    """Return the parameters of optimizers that are vectors and have no gradient of a pass."""
    held = _members(view) - _trained(view)
    params = (view.items.get(window_slot(Kind.PARAM, name, "model"), ()) for name in held)
    return {items[0].entry.name for items in params if items and len(items[0].entry.local_shape) == 1}


def _slices(view: StepView) -> set[str]:
    """Return the parameters that have gradients and are in no optimizer."""
    return _trained(view) - _members(view)


def _slicing_error(
    slot: Slot, flat: set[str], pair: StepPair
) -> Callable[[], Callable[[], Iterable[Sides]] | None]:
    """Return how to compute what of a difference the slices of the flat tensors do not explain."""

    def own() -> Callable[[], Iterable[Sides]] | None:
        sides = ((pair.a, pair.before_a), (pair.b, pair.before_b))
        found = [_residue(slot, view, before, flat) for view, before in sides]
        if found[0] is None or found[1] is None:
            return None
        (error_a, size_a), (error_b, size_b) = found[0], found[1]
        return lambda: [(error_b - error_a, np.fmax(size_a, size_b))]

    return own


def _residue(slot: Slot, view: StepView, before: StepView, flat: set[str]) -> Sides | None:
    """Return what a parameter differs by from the slice that it was copied from, None where none is found."""
    items = view.items.get(slot, ())
    if not items or not replica(items).source.stored(replica(items).entry):
        return None
    held = replica(items)
    values = held.read().astype(np.float64).ravel()
    for name in sorted(flat):
        whole = before.items.get(window_slot(Kind.PARAM, name, "model"), ())
        if not whole or not all(item.source.stored(item.entry) for item in whole):
            continue
        wide = one(replica(whole))
        if math.prod(wide.shape) > _MOST:
            continue
        numbers = np.concatenate([np.ravel(block) for block in wide.blocks()]).astype(np.float64)
        begin = _find(values, numbers, held.entry.dtype)
        if begin is not None:
            source = numbers[begin : begin + len(values)]
            eps = coarser_eps((held,))
            size = ROUNDED / (PEAK * OWN * eps) * spacing(source, held.entry.dtype)
            shape = held.entry.local_shape
            return (values - source).reshape(shape), size.reshape(shape)
    return None


def _find(values: np.ndarray, numbers: np.ndarray, dtype: str) -> int | None:
    """Return where values stand in a longer vector, rounded or not; None where they do not."""
    last = len(numbers) - len(values)
    if not len(values) or last < 0:
        return None
    allowed = ROUNDED * spacing(numbers[: last + 1], dtype)
    begins = np.flatnonzero(np.abs(numbers[: last + 1] - values[0]) <= allowed)[:_CANDIDATES]
    for begin in begins:
        source = numbers[begin : begin + len(values)]
        if np.all(np.abs(source - values) <= ROUNDED * spacing(source, dtype)):
            return int(begin)
    return None
