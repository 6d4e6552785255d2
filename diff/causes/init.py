"""Runs that do not start from the same values, and how what they start from is arranged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.tracer.types import INIT_STEP, Kind


def init_differs(case: Case) -> Sequence[Proposal]:
    """Propose that the runs do not start from the same values, and say where they differ."""
    if case.origin.node.step != INIT_STEP or case.one_sided is not None:
        return ()
    if case.origin.node.slot.kind == Kind.OPTIMIZER_STATE:
        return ()
    if not case.arrays:
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
    """Blocks along one dimension have changed places."""
    if len(case.arrays) != 1:
        return []
    a, b = case.arrays[0]
    for dim in range(a.ndim):
        left, right = np.moveaxis(a, dim, 0), np.moveaxis(b, dim, 0)
        rows = np.flatnonzero((left != right).reshape(len(left), -1).any(axis=1))
        source = _row_sources(left, right, rows) if len(rows) > 1 else None
        if source is None:
            continue
        mistaken = left.copy()
        mistaken[rows] = left[source]
        what = "rows" if dim == 0 else f"slices along dimension {dim}"
        text = f"{what} of {case.origin.node.slot.name} are permuted in b: {_moves(rows, source)}"
        number, words = float(len(rows)), f"{what} that moved"
        return [Proposal("layout.permuted_blocks", text, [mistaken], [right], [left], number, words)]
    return []


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
