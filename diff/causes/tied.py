"""One parameter of the reference that is several in b: their gradients are not added up."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add

import numpy as np

from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.stream import Sum
from tensortrace.tracer.types import Kind

_MOST = 1 << 22
_KINDS = frozenset({Kind.PARAM, Kind.LOCAL_GRAD})


def apart(case: Case) -> Iterator[Proposal]:
    """Propose that b has several parameters where a has one: their gradients add up to that of a."""
    slot = case.origin.node.slot
    if slot.kind not in _KINDS:
        return
    names = uses_of(case, slot.name)
    ours = {n: found for n in names if (found := case.pair.gradients_b.window_sum(n)) is not None}
    whole = next((found for n in names if (found := case.pair.gradients_a.window_sum(n)) is not None), None)
    if len(ours) < 2 or whole is None or np.prod(whole.shape) > _MOST:
        return
    values = {name: _read(found) for name, found in ours.items()}
    reference = _read(whole)
    if any(value.shape != reference.shape for value in values.values()):
        return
    total = reduce(add, values.values())
    size = float(np.vdot(total, total))
    factor = float(np.vdot(total, reference)) / size if size else 0.0
    used = " and ".join(sorted(values))
    text = f"{used} are one parameter in a and {len(values)} in b: their gradients are not added up"
    items = [item for name in values for item in case.pair.gradients_b.local_items(name)]
    first = next(iter(values.values()))
    yield Proposal(
        "tied.not_summed", text, [total * factor], [reference], [first * factor], float(len(values)),
        "parameters in the place of one", simplicity=-1, floor=case.gradient_floor(items), fitted=1,
    )  # fmt: skip


def _read(found: Sum) -> np.ndarray:
    return found.read().astype(np.float64)


def uses_of(case: Case, name: str) -> tuple[str, ...]:
    """Return the names under which a uses the parameter of this name; empty where it has but one."""
    for view in (case.pair.before_a, case.pair.a):
        for slot, items in view.find(Kind.PARAM):
            names = {slot.name}.union(*(item.entry.meta.aliases for item in items))
            if name in names and len(names) > 1:
                return tuple(sorted(names))
    return ()
