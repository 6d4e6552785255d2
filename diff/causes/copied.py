"""Mistakes in copying masters back to the parameters that passes compute with: in part, or from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.masters import COPY, is_copy
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import replica
from tensortrace.tracer.types import Kind

_MOST_ELEMENTS = 1 << 24
"""Of masters of more elements none are looked at: all of them are held."""

_CANDIDATES = 64
"""Places at which values may begin that are tried."""


def in_part(case: Case) -> Iterator[Proposal]:
    """Propose that part of the copies, such as one rank's, is still what it was before the step."""
    found = []
    for outcome, loaded in _copies(case):
        before = case.pair.before_b.items.get(outcome.node.slot)
        if before and (held := replica(before)).source.stored(held.entry):
            found.append((outcome.node.slot.name, loaded, held.read() == loaded.b))
    kept = [(name, loaded, same) for name, loaded, same in found if same.shape == loaded.b.shape]
    parts = [name for name, _, same in kept if same.any()]
    if not parts:
        return
    count, total = sum(int(np.sum(same)) for *_, same in kept), sum(same.size for *_, same in kept)
    if count == total:
        return  # said of all of them elsewhere
    shown = ", ".join(parts[:3]) + (", …" if len(parts) > 3 else "")
    yield Proposal(
        "value.not_updated",
        f"{count} of {total} elements were not copied in b: those of {shown} equal what was before the step",
        [np.where(same, loaded.b, loaded.a) for _, loaded, same in kept],
        [loaded.b for _, loaded, _ in kept], [loaded.a for _, loaded, _ in kept],
        0.0, "no change in the step", simplicity=1,
    )  # fmt: skip


def from_another_place(case: Case) -> Iterator[Proposal]:
    """Propose that a parameter is copied from another place: another's master, or elsewhere in a flat one."""
    copies = list(_copies(case))
    if not copies:
        return
    names = [s.name for s, _ in case.pair.before_b.find(Kind.PARAM) if s.slot == COPY]
    vector, begins = _vector(case, names)
    found = []
    for outcome, loaded in copies:
        begin, dtype = begins.get(outcome.node.slot.name), case.pair.b.items[outcome.node.slot][0].entry.dtype
        at = None if begin is None else _find(vector, loaded.b, dtype, begin)
        if at is not None and begin is not None:
            found.append((outcome.node.slot.name, loaded, at, at - begin))
    if not found:
        return
    name, _, at, by = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    other = next((other for other, begin in begins.items() if begin == at), None)
    place = f"{abs(by)} elements {'behind' if by > 0 else 'before'} its own, of all masters end to end"
    where = f"the master of {other}" if other else place
    yield Proposal(
        "layout.shifted", f"{name}{more}: copied from {where}",
        [vector[at : at + loaded.b.size].reshape(loaded.b.shape) for _, loaded, at, _ in found],
        [loaded.b for _, loaded, _, _ in found], [loaded.a for _, loaded, _, _ in found],
        float(by), "elements", floor=case.floor,
    )  # fmt: skip


def _copies(case: Case) -> Iterator[tuple[Outcome, Assembled]]:
    slot = case.origin.node.slot
    if slot.kind == Kind.PARAM and slot.slot == COPY:
        yield from ((o, o.assembled) for o in case.siblings if isinstance(o.assembled, Assembled))


def _vector(case: Case, names: list[str]) -> tuple[np.ndarray, dict[str, int]]:
    """Return the masters of b end to end, as its step began with them, and where each begins."""
    values: list[np.ndarray] = []
    begins: dict[str, int] = {}
    length = 0
    for slot, items in case.pair.before_b.find(Kind.PARAM):
        held = replica(items)
        if slot.slot != "model" or slot.name not in names or not held.source.stored(held.entry):
            continue
        begins[slot.name] = length
        values.append(np.ravel(held.read()))
        length += values[-1].size
        if length > _MOST_ELEMENTS:
            return np.zeros(0), {}
    return (np.concatenate(values) if values else np.zeros(0)), begins


def _find(vector: np.ndarray, copy: np.ndarray, dtype: str, own: int) -> int | None:
    """Return where else than at their own place values stand in a vector, None where they do not."""
    flat = np.ravel(copy)
    last = len(vector) - len(flat)
    if last < 0 or not len(flat):
        return None
    heads = np.flatnonzero(np.abs(vector[: last + 1] - flat[0]) <= 2.0**-7 * np.abs(flat[0]))[:_CANDIDATES]
    fitting = (int(n) for n in heads if is_copy(vector[n : n + len(flat)], flat, dtype))
    return next((n for n in fitting if n != own), None)
