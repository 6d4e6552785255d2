"""Parameters that a program keeps in one flat tensor, which an optimizer updates whole or by shards.

Frameworks copy gradients into it and parameters back out of it by code of their own. Each parameter is a
slice of it, found by its values; its gradient is made of all of theirs, at the spacing of the coarsest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.kinds import RUNGS
from tensortrace.diff.masters import spacing
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import StepPlan, coarser_eps, replica
from tensortrace.diff.plan.copies import ROUNDED
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import one
from tensortrace.diff.tolerance import OWN, PEAK, Unexplained, measure_unexplained
from tensortrace.tracer.types import Kind

_MOST = 1 << 28
"""Elements of a flat tensor beyond which none is sought in it."""

_CANDIDATES = 4096
"""Places at which a slice may begin that are tried."""


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
        if slot.kind in RUNGS and slot.name in flat and slot.slot == "grad":
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


def _slicing_error(slot: Slot, flat: set[str], pair: StepPair) -> Callable[[], Unexplained | None]:
    """Return how to compute what of a difference the slices of the flat tensors do not explain.

    Vectors that are equally long hold a parameter at the same place: values that stand elsewhere in one
    run's vector are another slice, copied by mistake.
    """

    def own() -> Unexplained | None:
        held_a, held_b = _held(slot, pair.a), _held(slot, pair.b)
        if held_a is None or held_b is None or held_a.entry.local_shape != held_b.entry.local_shape:
            return None
        for name in sorted(flat):
            vector_a, vector_b = _vector(name, pair.before_a), _vector(name, pair.before_b)
            if vector_a is None or vector_b is None:
                continue
            a, b = _Slice(held_a, vector_a), _Slice(held_b, vector_b)
            places = _places(a, b)
            if places is not None:
                (error_a, size_a), (error_b, size_b) = a.residue(places[0]), b.residue(places[1])
                return measure_unexplained([(error_b - error_a, np.fmax(size_a, size_b))])
        return None

    return own


def _held(slot: Slot, view: StepView) -> Item | None:
    items = view.items.get(slot, ())
    return replica(items) if items and replica(items).source.stored(replica(items).entry) else None


def _vector(name: str, before: StepView) -> np.ndarray | None:
    """Return the flat tensor that a step began with; None where it was not recorded, or is too long."""
    whole = before.items.get(window_slot(Kind.PARAM, name, "model"), ())
    if not whole or not all(item.source.stored(item.entry) for item in whole):
        return None
    wide = one(replica(whole))
    if math.prod(wide.shape) > _MOST:
        return None
    return np.concatenate([np.ravel(block) for block in wide.blocks()]).astype(np.float64)


class _Slice:
    """A parameter, and a flat vector that it may be a slice of."""

    def __init__(self, held: Item, vector: np.ndarray) -> None:
        self.held, self.vector = held, vector
        self.values = held.read().astype(np.float64)

    def places(self) -> list[int]:
        """Return where the values stand in the vector, rounded or not."""
        flat, dtype = self.values.ravel(), self.held.entry.dtype
        last = len(self.vector) - len(flat)
        if not len(flat) or last < 0:
            return []
        heads = self.vector[: last + 1]
        begins = np.flatnonzero(np.abs(heads - flat[0]) <= ROUNDED * spacing(heads, dtype))[:_CANDIDATES]
        return [int(begin) for begin in begins if self._stands(int(begin), flat, dtype)]

    def residue(self, begin: int) -> Sides:
        """Return what the parameter differs by from the slice, and the size that is allowed of it."""
        source = self.vector[begin : begin + self.values.size].reshape(self.values.shape)
        eps = coarser_eps((self.held,))
        return self.values - source, ROUNDED / (PEAK * OWN * eps) * spacing(source, self.held.entry.dtype)

    def _stands(self, begin: int, flat: np.ndarray, dtype: str) -> bool:
        source = self.vector[begin : begin + len(flat)]
        return bool(np.all(np.abs(source - flat) <= ROUNDED * spacing(source, dtype)))


def _places(a: _Slice, b: _Slice) -> tuple[int, int] | None:
    """Return where the parameter stands in the vector of each run; None where one does not tell."""
    in_a, in_b = a.places(), b.places()
    if len(a.vector) != len(b.vector):
        return (in_a[0], in_b[0]) if in_a and in_b else None
    both = sorted(set(in_a) & set(in_b))
    known = both or in_a or in_b
    return (known[0], known[0]) if known else None
