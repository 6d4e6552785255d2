"""Rungs of the ladder in another order: what is clipped, or updated, and reduced only then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.holders import local_of_copies
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.kinds import RUNGS
from tensortrace.diff.plan.clips import final_events
from tensortrace.tracer.types import Kind

_MOST_ELEMENTS = 1 << 24
"""Of more gradients at once none are looked at: all of them are held."""

_WORDS = {
    "clipped": ("clips", "by the norm of its own gradient"),
    "consumed": ("updates", "with its own gradient"),
}
"""What is not linear: unscaling and reducing may come in any order."""


def other_order(case: Case) -> Iterator[Proposal]:
    """Propose that b clips or updates before it reduces, where a reduces first.

    Events of one parameter on one rank are compared: parameters may overtake each other, as buckets do. What
    b's own gradients give in its own order must be what its optimizer consumed.
    """
    if case.origin.node.slot.kind not in RUNGS:
        return
    gradients_a, gradients_b = case.pair.gradients_a, case.pair.gradients_b
    names = [n for n in gradients_b.names if gradients_a.consumed(n) and gradients_b.consumed(n)]
    if (
        sum(math.prod(i.entry.local_shape) for n in names for i in gradients_b.consumed_copies(n))
        > _MOST_ELEMENTS
    ):
        return
    early = {_before_reduction(_order(gradients_a, n), _order(gradients_b, n)) for n in names}
    if len(early) != 1 or early == {None}:
        return
    first = str(early.pop())
    text = f"b {_WORDS[first][0]} before it reduces, each rank {_WORDS[first][1]}; a reduces first"
    mistaken, actual, reference, items = _in_this_order(names, case, updated_first=first == "consumed")
    if not mistaken:
        return
    size = sum(float(np.vdot(x, x)) for x in mistaken)
    factor = sum(float(np.vdot(x, y)) for x, y in zip(mistaken, actual, strict=True)) / size if size else 0.0
    yield Proposal(
        "ladder.order", text, [x * factor for x in mistaken], actual, reference, None,
        f"{first} before reduced", simplicity=-1, floor=case.gradient_floor(items), fitted=1,
    )  # fmt: skip


def _order(gradients: Gradients, name: str) -> tuple[str, ...]:
    """Return the rungs that a parameter's gradient climbs after the last backward, in order of events."""
    last: dict[str, Sequence[Item]] = {
        "reduced": gradients.rung_copies(Kind.REDUCED_GRAD, name),
        "unscaled": gradients.rung_copies(Kind.UNSCALED_GRAD, name),
        "clipped": gradients.before_clip_copies(name),
        "consumed": gradients.consumed_copies(name),
    }
    rank = min((i.source.rank for items in last.values() for i in items), default=0)
    events = {
        rung: item.entry.event for rung, items in last.items() for item in items if item.source.rank == rank
    }
    return tuple(sorted(events, key=lambda rung: events[rung]))


def _before_reduction(a: tuple[str, ...], b: tuple[str, ...]) -> str | None:
    """Return the last rung that b climbs before it reduces and a after, None where there is none."""
    if "reduced" not in b:
        return None
    a = a if "reduced" in a else ("reduced", *a)  # of one rank the gradient is whole from the start
    before, after = b[: b.index("reduced")], a[a.index("reduced") :]
    return next((rung for rung in reversed(before) if rung in after and rung in _WORDS), None)


def _in_this_order(
    names: Sequence[str], case: Case, *, updated_first: bool
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[Item]]:
    """Return (what b's gradients give in its order but for a factor, what b consumed, what a did), items."""
    gradients, coefficients = case.pair.gradients_b, _coefficients(case)
    mistaken: list[np.ndarray] = []
    actual: list[np.ndarray] = []
    reference: list[np.ndarray] = []
    held: list[Item] = []
    for name in names:
        consumed = gradients.consumed_copies(name)
        clipped = {
            rank: value.astype(np.float64) * coefficients.get(rank, 1.0)
            for rank, value in local_of_copies(gradients, name, consumed).items()
        }
        right = case.pair.gradients_a.consumed(name)
        copies = [c for c in consumed if c.source.rank in clipped]
        if right is None or not copies or not clipped:
            return [], [], [], []
        for copy in copies if updated_first else copies[:1]:
            mistaken.append(clipped[copy.source.rank] if updated_first else np.asarray(sum(clipped.values())))
            actual.append(copy.read().astype(np.float64))
            reference.append(right.read().astype(np.float64))
            held.append(copy)
    return mistaken, actual, reference, held


def _coefficients(case: Case) -> dict[int, float]:
    """Return the coefficient by which each rank of b clipped at the end of the window."""
    found: dict[int, float] = {}
    for event in final_events(case.pair.b):
        for item in event.held.get("coefficient", ()):
            for rank in item.ranks:
                found[rank] = found.get(rank, 1.0) * float(item.read())
    return found
