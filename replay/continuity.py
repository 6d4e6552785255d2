"""Contracts of what stays: recomputed passes, the next step's start, copies of masters, replicas."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tensortrace.diff.catalog import Item, Recomputed, Slot
from tensortrace.diff.compare import Sides
from tensortrace.diff.masters import COPIED, COPY, spacing
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import by_rank, coarser_eps, replica
from tensortrace.diff.plan.copies import ROUNDED
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.stream import one
from tensortrace.diff.tolerance import OWN, PEAK
from tensortrace.replay.computed import same_as
from tensortrace.replay.contract import Contract, Contracts, Step, readable
from tensortrace.tracer.types import Kind

FIRST_START = "nothing tells what the program did to it before the first recorded step"
NOT_READ = "what it should equal was not recorded"
REPLICA = "the copies of all ranks are equal"


def continuity(step: Step, contracts: Contracts) -> None:
    """Add the contracts of parameters between updates, and of copies that passes compute with."""
    for slot, items in step.view.find(Kind.PARAM):
        if slot.slot == "start":
            _start(slot, items, step, contracts)
        elif slot.slot in (COPY, COPIED):
            _copy(slot, items, step, contracts)


def _start(slot: Slot, items: tuple[Item, ...], step: Step, contracts: Contracts) -> None:
    before = step.before.items.get(slot._replace(slot="model"), ())
    if step.first:
        contracts.gap(slot, items, FIRST_START)
        return
    if not before or not readable(*items, *before):
        contracts.gap(slot, items, NOT_READ)
        return
    text = "it is what the update of the step before left"
    expected = same_as(by_rank(items)[0], replica(before))
    contracts.found.append(Contract(slot, None, items, expected, text=text))


def _copy(slot: Slot, items: tuple[Item, ...], step: Step, contracts: Contracts) -> None:
    """Say that what passes compute with is the rounded master."""
    view = step.view if slot.slot == COPIED else step.before
    masters = view.items.get(window_slot(Kind.PARAM, slot.name, "model"), ())
    first = by_rank(items)[0]
    shapes = {i.entry.local_shape for i in (*masters, first)}
    if not masters or len(shapes) > 1 or not readable(*items, *masters):
        contracts.gap(slot, items, NOT_READ)
        return
    own = partial(_beyond_rounding, replica(masters), first)
    expected = same_as(first, replica(masters))
    reads = ((None, window_slot(Kind.PARAM, slot.name, "model")),) if slot.slot == COPIED else ()
    contracts.found.append(Contract(slot, None, items, expected, reads, own, "its master, rounded"))


def _beyond_rounding(master: Item, copy: Item) -> Iterator[Sides]:
    eps = coarser_eps((copy,))
    for wide, narrow in zip(one(master).blocks(), one(copy).blocks(), strict=True):
        values = np.asarray(wide, np.float64)
        size = ROUNDED / (PEAK * OWN * eps) * spacing(values, copy.entry.dtype)
        yield np.asarray(narrow, np.float64) - values, size


def replicas(step: Step, contracts: Contracts) -> None:
    """Add that ranks' copies are equal where they are not, of state that nothing else is said of.

    Where they are, that is no replay of what they hold.
    """
    told = {contract.slot for contract in contracts.found}
    for kind in (Kind.PARAM, Kind.OPTIMIZER_STATE):
        for slot, items in step.view.find(kind):
            if slot in told or not odd_ranks(items):
                continue
            _equal(slot, items, contracts)
    for slot, items in step.view.find(Kind.SCHEDULE):
        of_members: dict[tuple[str, ...], list[Item]] = {}
        for item in items:
            of_members.setdefault(item.entry.meta.members, []).append(item)
        for members, held in of_members.items():
            if members and slot not in told and len({item.entry.digest for item in held}) > 1:
                _equal(slot, tuple(held), contracts)


def _equal(slot: Slot, items: tuple[Item, ...], contracts: Contracts) -> None:
    """Add that the copies of all ranks are equal, which they are not."""
    contracts.gaps = [gap for gap in contracts.gaps if gap.slot != slot]
    expected = same_as(by_rank(items)[0], by_rank(items)[0])
    contracts.found.append(Contract(slot, None, items, expected, text=REPLICA))


def recomputed(step: Step) -> tuple[int, list[Recomputed]]:
    """Return how many recomputed activations are the first pass bit by bit, and those that are not."""
    activations = [other for other in step.view.recomputed if other.slot.kind == Kind.ACTIVATION]
    odd = [other for other in activations if other.first.entry.digest != other.again.entry.digest]
    return len(activations) - len(odd), odd
