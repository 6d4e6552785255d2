"""Modules that draw: another mask, the same one on all ranks, or none since the mode is another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable, by_rows
from tensortrace.diff.catalog import Item
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.tracer.types import Kind

_ROUND_OFF = 2.0**-20


def other_mask(case: Case) -> Sequence[Proposal]:
    """Propose that a dropout was given the same and dropped other elements, or that it is off or on."""
    entry, loaded = case.origin.comparison, case.origin.assembled
    if not isinstance(entry, Comparison) or loaded is None or entry.slot.kind != Kind.ACTIVATION:
        return ()
    metas = [item.entry.meta for item in (*entry.items_a, *entry.items_b)]
    if not all("dropout" in (meta.module or "").lower() for meta in metas):
        return ()
    passed = given(case)
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    if not np.isfinite(a).all() or not np.isfinite(b).all() or entry.slot.slot.startswith("in"):
        return ()
    modes = [{item.entry.meta.training for item in items} for items in (entry.items_a, entry.items_b)]
    what = f"{metas[-1].module} {entry.slot.name}"
    other = (a == 0) != (b == 0)
    if modes[0] != modes[1] and passed is not None and passed.b.shape == b.shape:
        return (_other_mode(what, passed.b.astype(np.float64), a, b, training=modes[1] == {True}),)
    if not other.any():
        return ()
    mistaken = np.where(other, b, a)  # what both let through is the same
    count = int(other.sum())
    code, told = _generator(case, entry)
    text = f"{what} drops other elements: {count} of {b.size} are kept in one run only; {told}"
    return (
        Proposal(
            code, text, [mistaken], [b], [a], float(count), "elements kept in one run only",
            simplicity=-1, floor=_ROUND_OFF,
        ),
    )  # fmt: skip


def _other_mode(what: str, given: np.ndarray, a: np.ndarray, b: np.ndarray, *, training: bool) -> Proposal:
    """Propose the other mode: a dropout that is off passes on what it is given, else masks and scales it."""
    mistaken = given
    if training:
        kept = (b != 0) & (given != 0)
        size = float(np.vdot(given[kept], given[kept]))
        factor = float(np.vdot(given[kept], b[kept])) / size if size else 1.0
        mistaken = np.where(b != 0, given * factor, 0.0)
    modes = ("evaluation", "training")
    text = f"{what} is in {modes[training]} mode in b, in {modes[not training]} mode in a"
    words = "the mode of the module"
    return Proposal(
        "mode.training", text, [mistaken], [b], [a], float(training), words, simplicity=-2, floor=_ROUND_OFF
    )


def given(case: Case) -> Assembled | None:
    """Return what the origin's module call was given, in the same order; None where that was not recorded."""
    node = case.origin.node
    wanted = node.slot._replace(slot="in.0")
    sides = [
        [
            item
            for item in view.items.get(wanted, ())
            if item.part and (node.microbatch is None or item.part.number == node.microbatch)
        ]
        for view in (case.pair.a, case.pair.b)
    ]
    try:
        return by_rows(sides[0], sides[1], case.pairing) if all(sides) else None
    except NotComparable:
        return None


def _generator(case: Case, entry: Comparison) -> tuple[str, str]:
    """Return the code and the words for where the mask came from."""
    masks, others = _masks(entry.items_b), _masks(entry.items_a)
    alike = len(masks) > 1 and len(set(masks.values())) == 1
    if alike and (len(others) < 2 or len(set(others.values())) > 1):
        return "rng.same_on_all_ranks", f"all {len(masks)} ranks of b draw the same mask"
    if (
        len(masks) > 1
        and _stand_alike(_states(case, of_a=False))
        and not _stand_alike(_states(case, of_a=True))
    ):
        return "rng.same_on_all_ranks", "the generators of all ranks of b stood alike when the step began"
    elsewhere, told = _generators(case)
    return ("rng.differs" if elsewhere else "dropout.mask"), told


def _stand_alike(states: dict[tuple[int, str], str]) -> bool:
    """Tell whether the generators of several ranks have one state: ranks of rows of unequal length, too."""
    ranks = {rank for rank, _ in states}
    return len(ranks) > 1 and len({(name, state) for (_, name), state in states.items()}) == len(
        {name for _, name in states}
    )


def _masks(items: Sequence[Item]) -> dict[int, bytes]:
    """Return which elements each data cell kept in its first pass."""
    first = (item for item in items if not item.part or item.part.number == 0)
    return {item.cell: np.packbits(item.read().reshape(-1) != 0).tobytes() for item in first}


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
