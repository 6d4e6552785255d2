"""What modules added: a bias more often than once, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import replica
from tensortrace.tracer.types import Kind


def duplicated(case: Case) -> Sequence[Proposal]:
    """Propose that a module's bias was added more often than once, or not at all."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("out") or loaded is None:
        return ()
    bias = _param_before(case, f"{slot.name}.bias")
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    if bias is None or a.ndim < 1 or bias.shape != a.shape[-1:] or not bias.any():
        return ()
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(bias).all()):
        return ()
    times = float(np.mean((b - a) @ bias) / float(bias @ bias))
    whole = round(times)
    if not whole or abs(times - whole) > 0.01:
        return ()
    if whole == -1:
        text, code = f"the bias of {slot.name} is not added in b", "bias.missing"
    else:
        text, code = f"the bias of {slot.name} is added {whole + 1} times in b", "bias.duplicated"
    ranks = len(case.b.ranks)
    equals = f"every one of {ranks} ranks adds it" if whole + 1 == ranks > 1 else None
    return (Proposal(code, text, [a + whole * bias], [b], [a], float(whole + 1), equals, simplicity=-1),)


def _param_before(case: Case, name: str) -> np.ndarray | None:
    slot = Slot("window", Kind.PARAM, name, "model", 0)
    items = case.pair.before_b.items.get(slot)
    return replica(items).read().astype(np.float64) if items else None
