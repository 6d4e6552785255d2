"""Runs that do not start from the same values."""

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
    return (Proposal("init.differs", text, right, right, left, None, None, evidence, simplicity=2),)


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
