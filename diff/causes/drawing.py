"""Other random numbers: a dropout that drew another mask, and whether its generator stood elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.tracer.types import Kind

_ROUND_OFF = 2.0**-20


def other_mask(case: Case) -> Sequence[Proposal]:
    """Propose that a dropout was given the same and dropped other elements."""
    entry, loaded = case.origin.comparison, case.origin.assembled
    if not isinstance(entry, Comparison) or loaded is None or entry.slot.kind != Kind.ACTIVATION:
        return ()
    metas = [item.entry.meta for item in (*entry.items_a, *entry.items_b)]
    if not all("dropout" in (meta.module or "").lower() for meta in metas):
        return ()
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    other = (a == 0) != (b == 0)
    if not other.any():
        return ()
    mistaken = np.where(other, b, a)  # what both let through is the same
    count = int(other.sum())
    what = f"{metas[-1].module} {entry.slot.name}"
    elsewhere, told = _generators(case)
    code = "rng.differs" if elsewhere else "dropout.mask"
    text = f"{what} drops other elements: {count} of {b.size} are kept in one run only; {told}"
    return (
        Proposal(
            code, text, [mistaken], [b], [a], float(count), "elements kept in one run only",
            simplicity=-1, floor=_ROUND_OFF,
        ),
    )  # fmt: skip


def _generators(case: Case) -> tuple[bool, str]:
    """Tell whether any generator of torch stood elsewhere when the step began, and say what is known."""
    states_a, states_b = _states(case, of_a=True), _states(case, of_a=False)
    if not states_a or not states_b:
        return False, "the states of the generators were not recorded"
    if len({rank for rank, _ in states_a}) != len({rank for rank, _ in states_b}):
        return False, "ranks draw their own masks, and the runs have not as many ranks"
    differ = sorted(key for key in states_a.keys() & states_b.keys() if states_a[key] != states_b[key])
    if not differ:
        return (
            False,
            "the generators stood alike when the step began, so that the runs drew differently in it",
        )
    ranks = ", ".join(str(rank) for rank in dict.fromkeys(rank for rank, _ in differ))
    names = ", ".join(dict.fromkeys(name for _, name in differ))
    return True, f"the generator of rank {ranks} ({names}) stood elsewhere when the step began"


def _states(case: Case, *, of_a: bool) -> dict[tuple[int, str], str]:
    """Return the digest of each state of torch's generators, by rank and device."""
    view = case.pair.a if of_a else case.pair.b
    return {
        (item.source.rank, slot.name): item.entry.digest
        for slot, items in view.find(Kind.RNG)
        if slot.slot == "state" and slot.name not in ("python", "numpy")
        for item in items
    }
