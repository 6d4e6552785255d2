"""Optimizer state that was lost or miscounted, and parameters that the optimizer passes over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot, StepView
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.compare import EPS
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.plan.updates import update_inputs
from tensortrace.diff.update import UpdateInputs, predict_state
from tensortrace.tracer.types import INIT_STEP, Kind

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "sum")


def lost_moment(case: Case) -> Sequence[Proposal]:
    """Propose that a moment starts from zero, or is missing, where the reference carries one on."""
    slot = case.origin.node.slot
    if slot.kind != Kind.OPTIMIZER_STATE or slot.slot not in (*_MOMENTS, "step"):
        return ()
    if case.one_sided is not None:
        return _missing_moment(case)
    if slot.slot == "step":
        return _recounted(case)
    proposals = []
    if case.arrays and not any(np.any(b) for _, b in case.arrays):
        left, right = (list(side) for side in zip(*case.arrays, strict=True))
        text = f"{slot.slot} of {len(left)} parameters is zero in b: the moment was lost"
        proposals.append(
            Proposal(
                "optimizer.lost_moment", text, [np.zeros_like(a) for a in left], right, left, 0.0, "zero"
            )
        )
    return proposals + _restarted(case)


def _missing_moment(case: Case) -> list[Proposal]:
    found = case.one_sided
    assert found is not None
    if found.side != "a" or case.origin.node.step != INIT_STEP:
        return []
    slots = sorted({o.node.slot.slot for o in case.siblings})
    value = replica(found.items).read()
    text = (
        f"{', '.join(slots)} of {found.slot.name} is missing in b where a starts with it: the moment was lost"
    )
    zeros = np.zeros_like(value)
    return [Proposal("optimizer.lost_moment", text, [zeros], [zeros], [value], 0.0, "no state at the start")]


def _restarted(case: Case) -> list[Proposal]:
    """In the middle of a run: b's moment is what its formula gives from zero."""
    slot = case.origin.node.slot
    found = [_fresh(o.node.slot, case) for o in case.siblings]
    text = f"{slot.slot} restarts from zero in b: the moment before this step was lost"
    return _lost(text, found)


def _recounted(case: Case) -> list[Proposal]:
    """In the middle of a run: b counts its updates from one again, and its moments are fresh."""
    if case.origin.node.step == INIT_STEP or any(float(b) != 1 or float(a) <= 1 for a, b in case.arrays):
        return []
    names = {o.node.slot.name for o in case.siblings}
    moments = [s for s in case.pair.b.items if s.kind == Kind.OPTIMIZER_STATE and s.slot in _MOMENTS]
    found = [_fresh(s, case) for s in moments if s.name in names]
    slots = ", ".join(sorted({s.slot for s in moments}))
    text = f"step, {slots} restart in b: the optimizer's state before this step was lost"
    return _lost(text, found)


def _lost(text: str, found: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray] | None]) -> list[Proposal]:
    kept = [f for f in found if f is not None]
    if not kept or len(kept) != len(found):
        return []
    mistaken, actual, reference = (list(side) for side in zip(*kept, strict=True))
    floor = 64 * EPS["float32"]
    words = "a fresh moment"
    return [Proposal("optimizer.lost_moment", text, mistaken, actual, reference, 0.0, words, floor=floor)]


def _fresh(slot: Slot, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (what b's update gives from no state, b's moment, a's); None where a part is not known."""
    inputs = update_inputs(slot.name, case.pair.b, case.pair.before_b)
    theirs = case.pair.a.items.get(slot)
    if inputs is None or not theirs or case.origin.node.step == INIT_STEP:
        return None
    fresh = UpdateInputs(inputs.optimizer, inputs.param, inputs.gradient, {}, inputs.after, inputs.hypers)
    expected = predict_state(fresh, slot.slot)
    if expected is None:
        return None
    return expected, replica(case.pair.b.items[slot]).read(), replica(theirs).read()


def step_counter(case: Case) -> Sequence[Proposal]:
    """Propose that the optimizer counts its updates from elsewhere, which changes the bias correction."""
    slot = case.origin.node.slot
    if slot.kind != Kind.OPTIMIZER_STATE or slot.slot != "step" or not case.arrays:
        return ()
    left, right = (list(side) for side in zip(*case.arrays, strict=True))
    shift = float(right[0]) - float(left[0])
    text = (
        f"the optimizer's step counter of {len(left)} parameters is off by {shift:+g}: "
        f"{float(right[0]):g} in b, {float(left[0]):g} in a"
    )
    mistaken = [x + shift for x in left]
    return (
        Proposal(
            "optimizer.step_counter", text, mistaken, right, left, shift, "updates too many", simplicity=2
        ),
    )


def param_frozen(case: Case) -> Sequence[Proposal]:
    """Propose that the optimizer passed over parameters: neither they nor their state changed in b."""
    slot = case.origin.node.slot
    kinds = (Kind.OPTIMIZER_STATE, Kind.PARAM, Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD)
    if slot.kind == Kind.CLIPPED_GRAD and (case.one_sided is None or case.one_sided.side == "b"):
        return ()
    if slot.kind not in kinds or slot.slot == "start" or case.origin.node.step == INIT_STEP:
        return ()
    names = list(dict.fromkeys(o.node.slot.name for o in case.siblings))
    kept = [_unchanged(name, case) for name in names]
    if any(k is None for k in kept):
        return ()
    mistaken, actual, reference = (list(side) for side in zip(*(k for k in kept if k), strict=True))
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    text = f"the optimizer of b passes over {shown}: value and state are those before the step"
    if slot.kind == Kind.LOCAL_GRAD:
        text += ", and no gradient reaches it"
    if slot.kind == Kind.CLIPPED_GRAD:
        text += ", since it has no gradient when the optimizer steps"
    return (Proposal("optimizer.param_frozen", text, mistaken, actual, reference, 0.0, "no change"),)


def _unchanged(name: str, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (value before, after, value of a) of a parameter that b did not update, None if it did."""
    before, after = _own(name, case.pair.before_b), _own(name, case.pair.b)
    reference = case.pair.a.items.get(_param(name))
    if before != after or not reference or _param(name) not in after:
        return None
    values = (case.pair.before_b, case.pair.b, case.pair.a)
    old, new, right = (replica(view.items[_param(name)]).read() for view in values)
    return old, new, right


def _own(name: str, view: StepView) -> dict[Slot, str]:
    """Return the digests of a parameter and of its optimizer state."""
    slots = (*view.named(Kind.PARAM, name), *view.named(Kind.OPTIMIZER_STATE, name))
    return {slot: replica(view.items[slot]).entry.digest for slot in slots if slot.slot != "start"}


def _param(name: str) -> Slot:
    return Slot("window", Kind.PARAM, name, "model", 0)
