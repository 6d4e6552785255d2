"""Values that are wrong by themselves: zero, negated, shifted, rounded, not finite, not updated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import replica
from tensortrace.tracer.types import INIT_STEP, Kind

_TENSORS = frozenset(Kind) - {Kind.INPUT, Kind.SCHEDULE, Kind.LOSS, Kind.OPTIMIZER_STATE}
_HELD = _TENSORS | {Kind.OPTIMIZER_STATE, Kind.INPUT}
SHARPER = {"bfloat16": 16, "float16": 13}
"""Bits of a float32 mantissa that a dtype leaves out."""


def _pair(case: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both tensors of an origin that is neither a setting nor exact nor left over, None otherwise."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    leftover = slot.slot == "start" and slot.kind != Kind.PARAM
    if loaded is None or slot.kind not in _TENSORS or slot.name == "(clip)" or leftover:
        return None
    return loaded.a.astype(np.float64), loaded.b.astype(np.float64)


def nonfinite(case: Case) -> Sequence[Proposal]:
    """Propose that elements are NaN or infinite, and everything else is right."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    chosen = slot.kind in (Kind.INPUT, Kind.SCHEDULE) or slot.slot in ("norm_type", "max_norm")
    if loaded is None or chosen or loaded.exact:
        return ()
    if slot.slot in ("norm_type", "max_norm"):  # settings: infinity is one of them
        return ()
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    bad = ~np.isfinite(b) & np.isfinite(a)
    if not bad.any():
        return ()
    nans, first = int(np.isnan(b[bad]).sum()), tuple(int(n) for n in np.argwhere(bad)[0]) if a.ndim else ()
    text = (
        f"{int(bad.sum())} of {b.size} elements are not finite ({nans} NaN, {int(bad.sum()) - nans} infinite)"
        f"{f', the first at {list(first)}' if first else ''}; everything that they were computed from is"
    )
    mistaken = np.where(bad, b, a)
    number = float(bad.sum())
    return (Proposal("value.nonfinite", text, [mistaken], [b], [a], number, "elements that are not finite"),)


def zero(case: Case) -> Sequence[Proposal]:
    """Propose that a tensor is zero."""
    found = _pair(case)
    if found is None or found[1].any() or not found[0].any():
        return ()
    a, b = found
    return (Proposal("value.zero", "every element is zero in b", [np.zeros_like(a)], [b], [a], 0.0, "zero"),)


def sign(case: Case) -> Sequence[Proposal]:
    """Propose that a tensor has the opposite sign."""
    found = _pair(case)
    if found is None or not found[0].any():
        return ()
    a, b = found
    text = "every element has the opposite sign in b"
    return (Proposal("value.sign", text, [-a], [b], [a], -1.0, "-1"),)


def offset(case: Case) -> Sequence[Proposal]:
    """Propose that one constant was added to every element."""
    found = _pair(case)
    if found is None or found[0].size < 2 or not np.isfinite(found[1]).all():
        return ()
    a, b = found
    constant = float(np.mean(b - a))
    if not constant:
        return ()
    equals = _known_constant(case, constant)
    text = f"every element is off by {constant:+.6g}" + (f", {equals}" if equals else "")
    return (
        Proposal("value.offset", text, [a + constant], [b], [a], constant, equals, simplicity=1, fitted=1),
    )


def _known_constant(case: Case, constant: float) -> str | None:
    counts = ((case.world_b, "the world size"), (case.microbatches_b, "the number of microbatches"))
    for count, words in counts:
        for sign_, label in ((1, "log"), (-1, "-log")):
            value = sign_ * math.log(count)
            if count > 1 and math.isclose(constant, value, rel_tol=1e-4):
                return f"{label} of {words} ({label}({count}))"
    return None


def rounded(case: Case) -> Sequence[Proposal]:
    """Propose that b holds a's values in a lower precision than its dtype has."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    leftovers = slot.kind == Kind.LOCAL_GRAD and slot.slot == "start"
    if loaded is None or loaded.exact or slot.kind not in _HELD or slot.name == "(clip)" or leftovers:
        return ()
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    if not np.isfinite(b).all() or (slot.kind == Kind.OPTIMIZER_STATE and a.size < 2):
        return ()  # one number of the state is a count, which is short by itself
    proposals = []
    for dtype, bits in SHARPER.items():
        if not np.array_equal(rounded_to(b, dtype), b) or np.array_equal(rounded_to(a, dtype), a):
            continue
        # a value near the middle of two neighbours may go either way in a correct run
        half = np.exp2(np.floor(np.log2(np.maximum(np.abs(a), 1e-300))) - 24 + bits)
        either = np.abs(b - a) <= half * (1 + 2.0**-6)
        mistaken = np.where(either, b, rounded_to(a, dtype))
        text = f"b holds no more than the precision of {dtype}, and is a rounded to it"
        proposals.append(Proposal("precision.rounded", text, [mistaken], [b], [a], 2.0 ** (bits - 23), dtype))
    return proposals  # what bfloat16 holds, float16 may hold too: only one of them fits a


def rounded_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values as the nearest of a 16-bit dtype, in float64."""
    single = values.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float64)
    bits = single.view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.asarray(even.astype(np.uint32).view(np.float32).astype(np.float64))


def not_updated(case: Case) -> Sequence[Proposal]:
    """Propose that nothing updated the value: it is bitwise the one before the step."""
    slot = case.origin.node.slot
    if slot.kind not in (Kind.PARAM, Kind.OPTIMIZER_STATE) or case.origin.node.step == INIT_STEP:
        return ()
    if slot.kind == Kind.PARAM and slot.slot == "start":
        return _undone(case)
    kept = [(o, case.pair.before_b.items.get(o.node.slot)) for o in case.siblings if o.assembled is not None]
    found = [(o, replica(i).read()) for o, i in kept if i]
    stale = [(o, v) for o, v in found if o.assembled and np.array_equal(o.assembled.b, v)]
    if len(stale) != len(kept) or not stale:
        return ()
    if slot.slot == "step" and not all(_kept_param(case, o.node.slot.name) for o, _ in stale):
        return ()  # a counter that starts anew may show the same number
    names = ", ".join(o.node.slot.name for o, _ in stale[:3]) + (", …" if len(stale) > 3 else "")
    text = f"{slot.kind} {slot.slot} was not updated in b: {names} equal(s) the value before the step"
    return (
        Proposal(
            "value.not_updated",
            text,
            [v for _, v in stale],
            [o.assembled.b for o, _ in stale if o.assembled],
            [o.assembled.a for o, _ in stale if o.assembled],
            0.0,
            "no change in the step",
            simplicity=1,
        ),
    )


def _undone(case: Case) -> Sequence[Proposal]:
    """Propose that something took an update back: a parameter is, bit by bit, what it was before it."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    model = slot._replace(slot="model")
    if loaded is None:
        return ()
    views = (case.b.view(s) for s in sorted((*case.b.steps, INIT_STEP), reverse=True) if s < case.pair.b.step)
    held = [replica(v.items[model]).read() for v in views if model in v.items][1:]  # what it became first
    for value in held[:1]:
        text = f"the last update of {slot.name} was taken back in b: it is, bit by bit, what it was before it"
        if np.array_equal(value, loaded.b):
            words = "the value of before the update"
            return (Proposal("value.not_updated", text, [value], [loaded.b], [loaded.a], 0.0, words),)
    return ()


def _kept_param(case: Case, name: str) -> bool:
    slot = Slot("window", Kind.PARAM, name, "model", 0)
    now, before = (v.items.get(slot, ()) for v in (case.pair.b, case.pair.before_b))
    return bool(now and before) and replica(now).entry.digest == replica(before).entry.digest
