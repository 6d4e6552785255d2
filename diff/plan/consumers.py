"""Which recorded tensors a parameter's gradient was computed from: its norms bound what was summed."""

from __future__ import annotations

from tensortrace.diff.catalog import Slot, StepView, enclosing
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.types import ROOT, Kind

Ref = tuple[int | None, Slot]


def consumers(name: str, pair: StepPair) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
    """Return (activation gradients that flow into a parameter's gradient, activations it is multiplied by).

    The module that owns a parameter uses it, or where that was never called, the nearest above that was.
    What it computes comes out of it, or goes into the modules that it calls; what it computes from comes
    into it, or out of those. Of a module that calls no other these are its outputs and its inputs.
    """
    outs: dict[Ref, None] = {}
    ins: dict[Ref, None] = {}
    for view in (pair.a, pair.b):
        for user in sorted({_user(alias, view) for alias in _aliases(name, pair)}):
            for called, given, returned in (
                (user, "in", "out"),
                *((c, "out", "in") for c in view.calls(user)),
            ):
                outs |= _of(Kind.ACTIVATION_GRAD, called, returned, view, pair)
                ins |= _of(Kind.ACTIVATION, called, given, view, pair)
    return tuple(outs), tuple(ins)


def _aliases(name: str, pair: StepPair) -> set[str]:
    slot = Slot("window", Kind.PARAM, name, "model", 0)
    views = (pair.before_a, pair.before_b, pair.a, pair.b)
    return {name}.union(*(i.entry.meta.aliases for v in views for i in v.items.get(slot, ())))


def _user(parameter: str, view: StepView) -> str:
    """Return the innermost module around a parameter that was called."""
    return next((outer for outer in enclosing(parameter) if view.named(Kind.ACTIVATION, outer)), ROOT)


def _of(kind: Kind, name: str, way: str, view: StepView, pair: StepPair) -> dict[Ref, None]:
    slots = (s for s in view.named(kind, name) if s.phase == "train" and s.slot.split(".")[0] == way)
    return {(g, slot): None for slot in slots for g in _groups(slot, view, pair)}


def _groups(slot: Slot, view: StepView, pair: StepPair) -> dict[int | None, None]:
    return {pair.group(item.part): None for item in view.items[slot] if item.part is not None}
