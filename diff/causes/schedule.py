"""Wrong values that enter the update: schedule position, hyperparameters, group membership."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.scheduled import scheduled
from tensortrace.tracer.types import Kind


def position(case: Case) -> Sequence[Proposal]:
    """Propose that the scheduler stands elsewhere: stepped per microbatch, or off by a constant."""
    slot = case.origin.node.slot
    if slot.kind != Kind.SCHEDULE or slot.slot not in ("position", "lr"):
        return ()
    positions = [p for p in _positions(case) if p is not None]
    if not positions:
        return ()
    left, right = (np.array(side, dtype=np.float64) for side in zip(*positions, strict=True))
    if np.array_equal(left, right):
        return ()
    per_microbatch = _per_microbatch(case, left, right)
    if per_microbatch is not None:
        mistaken, words = per_microbatch
        text = f"the scheduler is stepped once per microbatch: {_pairs_text(left, right)}"
        since = max(int(np.argmax(left != right)) - 1, 0)
        moved = float(left[-1] - left[since])
        number = float((right[-1] - right[since]) / moved) if moved else float(right[0] - left[0])
        evidence = _lr_evidence(case)
        return (Proposal("schedule.position", text, [mistaken], [right], [left], number, words, evidence),)
    per_rank = _per_rank(case, left, right)
    if per_rank is not None:
        text = f"the scheduler is stepped once for each rank: {_pairs_text(left, right)}"
        words = f"the world size of b ({case.world_b})"
        number = float(case.world_b)
        evidence = _lr_evidence(case)
        return (Proposal("schedule.position", text, [per_rank], [right], [left], number, words, evidence),)
    begins = int(np.argmax(left != right))  # before it both stand alike
    offset = float(right[begins] - left[begins])
    text = f"the scheduler's position is off by {offset:g}: {_pairs_text(left[begins:], right[begins:])}"
    mistaken = left + np.where(np.arange(len(left)) < begins, 0.0, offset)
    return (
        Proposal("schedule.position", text, [mistaken], [right], [left], offset, None, _lr_evidence(case)),
    )


def _per_rank(case: Case, left: np.ndarray, right: np.ndarray) -> np.ndarray | None:
    """Return where b would stand if it moved on by its number of ranks where a moves on by one."""
    mistaken = left * case.world_b
    fits = len(left) > 1 and case.world_b > 1 and np.array_equal(mistaken, right)
    return mistaken if fits else None


def _per_microbatch(case: Case, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, str] | None:
    """Return where b would stand if it moved on with each microbatch where a does once per window.

    Windows may have different numbers of microbatches; b may move before the update of its window or after,
    and may begin to move so in any window.
    None where no such count explains it.
    """
    counts = [b.last_microbatch() + 1 for (_, b), p in zip(case.views(), _positions(case), strict=True) if p]
    if max(counts, default=0) < 2:
        return None
    words = f"the number of microbatches in a window ({', '.join(map(str, dict.fromkeys(counts)))})"
    moves = np.diff(left, prepend=left[:1])
    for of_window in (np.array(counts), np.array([0, *counts[:-1]])):
        passed = np.cumsum(moves * of_window)
        shift = right[0] - passed[0] - left[0] * counts[0]
        mistaken = left[0] * counts[0] + shift + passed
        if 0 <= shift <= counts[0] and np.array_equal(mistaken, right):
            return mistaken, words
    begins = int(np.argmax(left != right))
    if begins < 1 or begins == len(left) - 1:  # one position alone is off by a constant as well
        return None
    for of_window in (np.array(counts), np.array([0, *counts[:-1]])):
        own = np.where(np.arange(len(left)) < begins, 1, of_window)
        mistaken = left[0] + np.cumsum(moves * own)
        if np.array_equal(mistaken, right):
            return mistaken, f"{words}, from where the runs part"
    return None


def _positions(case: Case) -> list[tuple[float, float] | None]:
    found = ((scheduled(a, "position"), scheduled(b, "position")) for a, b in case.views())
    return [None if a is None or b is None else (a, b) for a, b in found]


def _pairs_text(left: np.ndarray, right: np.ndarray) -> str:
    shown = ", ".join(f"{b:g} for {a:g}" for a, b in zip(left[:4], right[:4], strict=True))
    return f"position {shown}" + (", …" if len(left) > 4 else "")


def _lr_evidence(case: Case) -> tuple[str, ...]:
    """Tell whether b's learning rate is a's at the position where b stands."""
    rate_at: dict[float, float] = {}
    lines = []
    for view_a, _ in case.views():
        at, rate = scheduled(view_a, "position"), scheduled(view_a, "lr")
        if at is not None and rate is not None:
            rate_at[at] = rate
    for view_a, view_b in case.views():
        at, rate = scheduled(view_b, "position"), scheduled(view_b, "lr")
        if at in rate_at and rate is not None and at is not None:
            verdict = "equals" if rate == rate_at[at] else f"differs from {rate_at[at]:.9g},"
            lines.append(f"step {view_a.step}: lr {rate:.9g} of b {verdict} a's lr at position {at:g}")
    return tuple(lines[:4])


def hyperparameter(case: Case) -> Sequence[Proposal]:
    """Propose that a value of the update formula differs, by setting or by the parameter's group."""
    slot = case.origin.node.slot
    if slot.kind != Kind.SCHEDULE or not case.arrays or slot.slot in ("position", "skipped"):
        return ()
    a, b = case.arrays[0]
    entry = case.origin.comparison
    what = getattr(entry, "text", "") or slot.slot
    mixed = _values_elsewhere(case, slot, float(b))
    text = f"{what}: {float(b):.9g}, in the reference {float(a):.9g}" + (f"; {mixed}" if mixed else "")
    return (
        Proposal(
            "optimizer.hyperparameter",
            text,
            [b],
            [b],
            [a],
            float(b),
            None,
            (f"{slot.slot} enters the update formula and was read when the update began",),
            simplicity=1,
        ),
    )


def _values_elsewhere(case: Case, slot: Slot, value: float) -> str:
    """Tell whether the wrong value is the right one of another group: a mix-up of groups."""
    for other, items in case.pair.a.find(Kind.SCHEDULE):
        if other.slot == slot.slot and float(replica(items).read()) == value:
            return f"{value:.9g} is what the reference gives to {other.name}: the groups are mixed up"
    return ""


def param_missing(case: Case) -> Sequence[Proposal]:
    """Propose that parameters are in no optimizer in one run."""
    found = case.one_sided
    if found is None or found.slot.slot != "members":
        return ()
    text = found.reason
    lacking = "b" if found.side == "a" else "a"
    at_rest = _steps_that_update(case, found.side, found.names)
    names = ", ".join(found.names[:3]) + (", …" if len(found.names) > 3 else "")
    step = case.origin.node.step
    if step in at_rest:
        text = f"the optimizer of {names} makes more steps in step {step} of {found.side} than in {lacking}"
        return (told("boundary.missing", text, found.slot.call + 1, "steps where the other makes fewer"),)
    if at_rest:
        text = (
            f"the optimizer of {names} makes no step in step {step} of {lacking}, as it "
            f"does in step {', '.join(map(str, at_rest[:3]))}"
        )
        return (told("boundary.missing", text, len(found.names), "parameters that are left as they were"),)
    one, none = np.ones(1), np.zeros(1)
    actual, reference = (none, one) if found.side == "a" else (one, none)
    return (Proposal("optimizer.param_missing", text, [actual], [actual], [reference]),)


def _steps_that_update(case: Case, side: str, names: Sequence[str]) -> list[int]:
    """Return the steps in which the run that lacks an update of parameters makes it."""
    found = []
    for view_a, view_b in case.views():
        lacking = view_b if side == "a" else view_a
        members = {n for _, i in lacking.find(Kind.SCHEDULE) for each in i for n in each.entry.meta.members}
        if members.issuperset(names):
            found.append(view_a.step)
    return found
