"""Values that are stale, zero, leftover, or different from the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.plan.state import update_inputs
from tensortrace.diff.update import UpdateInputs, predict_state
from tensortrace.tracer.types import INIT_STEP, Kind

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "square_avg", "sum")


def not_zeroed(case: Case) -> Sequence[Proposal]:
    """Propose that ``.grad`` still holds what the previous step consumed when the window opened."""
    slot = case.origin.node.slot
    if slot.kind != Kind.LOCAL_GRAD or slot.slot != "start":
        return ()
    before = {
        s: i for s, i in case.pair.before_b.items.items() if s.kind == Kind.CLIPPED_GRAD and s.slot == "grad"
    }
    mistaken, actual, reference = [], [], []
    for outcome in case.siblings:
        consumed = before.get(outcome.node.slot._replace(kind=Kind.CLIPPED_GRAD, slot="grad"))
        loaded = outcome.assembled
        left = [i for i in consumed or () if i.entry.microbatch is None]
        if loaded is None or not left:
            continue
        mistaken.append(replica(left).read())
        actual.append(loaded.b)
        reference.append(loaded.a)
    if not mistaken:
        return ()
    text = (
        f"zero_grad is missing: when the window opened, .grad of {len(mistaken)} parameters still held the "
        "gradient that the previous step consumed"
    )
    return (
        Proposal("grad.not_zeroed", text, mistaken, actual, reference, 1.0, "the previous step's gradient"),
    )


def not_updated(case: Case) -> Sequence[Proposal]:
    """Propose that nothing updated the value: it is bitwise the one before the step."""
    slot = case.origin.node.slot
    if slot.kind not in (Kind.PARAM, Kind.OPTIMIZER_STATE) or case.origin.node.step == INIT_STEP:
        return ()
    kept = [(o, case.pair.before_b.items.get(o.node.slot)) for o in case.siblings if o.assembled is not None]
    found = [(o, replica(i).read()) for o, i in kept if i]
    stale = [(o, v) for o, v in found if o.assembled and np.array_equal(o.assembled.b, v)]
    if len(stale) != len(kept) or not stale:
        return ()
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
        ),
    )


def lost_moment(case: Case) -> Sequence[Proposal]:
    """Propose that a moment starts from zero, or is missing, where the reference carries one on."""
    slot = case.origin.node.slot
    if slot.kind != Kind.OPTIMIZER_STATE or slot.slot not in _MOMENTS:
        return ()
    if case.one_sided is not None:
        return _missing_moment(case)
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
    if found.side != "a":
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
    mistaken, actual, reference = [], [], []
    for outcome in case.siblings:
        inputs = update_inputs(outcome.node.slot.name, case.pair.b, case.pair.before_b)
        if inputs is None or outcome.assembled is None or case.origin.node.step == INIT_STEP:
            return []
        fresh = UpdateInputs(inputs.optimizer, inputs.param, inputs.gradient, {}, inputs.after, inputs.hypers)
        expected = predict_state(fresh, outcome.node.slot.slot)
        if expected is None:
            return []
        mistaken.append(expected)
        actual.append(outcome.assembled.b)
        reference.append(outcome.assembled.a)
    text = f"{case.origin.node.slot.slot} restarts from zero in b: the moment before this step was lost"
    return [Proposal("optimizer.lost_moment", text, mistaken, actual, reference, 0.0, "a fresh moment")]


def init_differs(case: Case) -> Sequence[Proposal]:
    """Propose that the runs do not start from the same values, and say where they differ."""
    if case.origin.node.step != INIT_STEP or case.one_sided is not None:
        return ()
    if case.origin.node.slot.kind == Kind.OPTIMIZER_STATE:
        return ()
    left, right = (list(side) for side in zip(*case.arrays, strict=True))
    names = [o.node.slot.name for o in case.siblings]
    text = f"{len(names)} tensor(s) differ before the first step: {', '.join(names[:4])}"
    evidence = tuple(
        line
        for o in case.siblings[:4]
        if (line := _where(o.node.slot, o.assembled and (o.assembled.a, o.assembled.b)))
    )
    return (
        Proposal("init.differs", text, right, right, left, None, None, evidence, simplicity=2),
        *_permuted(case),
    )


def _where(slot: Slot, arrays: object) -> str:
    if not isinstance(arrays, tuple):
        return ""
    a, b = arrays
    wrong = np.argwhere(np.asarray(a) != np.asarray(b))
    if not len(wrong) or not np.ndim(a):
        return ""
    first, last = wrong.min(axis=0), wrong.max(axis=0)
    box = ", ".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in zip(first, last, strict=True))
    return f"{slot.name}: {len(wrong)} of {np.size(a)} elements differ, all within [{box}]"


def _permuted(case: Case) -> list[Proposal]:
    """Two equally long blocks of rows have changed places."""
    if len(case.arrays) != 1 or case.arrays[0][0].ndim == 0:
        return []
    a, b = case.arrays[0]
    rows = np.flatnonzero((a != b).reshape(len(a), -1).any(axis=1))
    if len(rows) < 2:
        return []
    source = _row_sources(a, b, rows)
    if source is None:
        return []
    mistaken = a.copy()
    mistaken[rows] = a[source]
    text = f"rows of {case.origin.node.slot.name} are permuted in b: {_moves(rows, source)}"
    return [
        Proposal("layout.permuted_blocks", text, [mistaken], [b], [a], float(len(rows)), "rows that moved")
    ]


def _row_sources(a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Return which row of ``a`` each differing row of ``b`` is; None where one is none of them."""
    where: dict[bytes, list[int]] = {}
    for row in rows:
        where.setdefault(np.ascontiguousarray(a[row]).tobytes(), []).append(int(row))
    found = []
    for row in rows:
        waiting = where.get(np.ascontiguousarray(b[row]).tobytes())
        if not waiting:
            return None
        found.append(waiting.pop(0))
    return np.array(found)


def _moves(rows: np.ndarray, source: np.ndarray) -> str:
    """Tell runs of rows that moved together."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(source) != 1)) + 1
    parts = []
    for to, origin in zip(np.split(rows, breaks)[:4], np.split(source, breaks)[:4], strict=True):
        parts.append(f"{to[0]}-{to[-1]} hold a's {origin[0]}-{origin[-1]}")
    return "; ".join(parts)
