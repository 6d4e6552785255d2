"""Contracts of gradients before a clip: leftovers, reduction, unscaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import by_rank
from tensortrace.diff.stream import Sum, Term
from tensortrace.replay.computed import computed
from tensortrace.replay.contract import (
    Contract,
    Contracts,
    Ref,
    Step,
    beyond_number,
    beyond_sum,
    by_microbatch,
    readable,
)
from tensortrace.tracer.types import Kind

NOT_READ = "what it was computed from was not recorded, or not stored"
GOING_ON = "no optimizer consumed it in the window before: it may go on adding up"
UNCONSUMED = "no optimizer consumes it: nothing comes of what is left"
OPERATION = "how ranks are added up by {op} is not recorded"

_WRAPPERS = frozenset({"ddp", "fsdp", "fully_shard"})
"""Wrappers that average gradients over their ranks."""

_PER_SUM = {"sum": False, "avg": True}


def gradients(step: Step, contracts: Contracts) -> None:
    """Add the contracts of the rungs from what is left in ``.grad`` to the unscaled gradient."""
    for slot, items in step.view.find(Kind.LOCAL_GRAD):
        if slot.slot == "start" and step.overwritten:
            contracts.gap(slot, items, "the program writes new gradients over it")
        elif slot.slot == "start" and not step.gradients.consumed_copies(slot.name):
            contracts.gap(slot, items, UNCONSUMED)
            contracts.notes.append(f"{slot.name} has gradients and no optimizer consumes them")
        elif (
            slot.slot == "start"
            and window_slot(Kind.CLIPPED_GRAD, slot.name, "grad") not in step.before.items
        ):
            contracts.gap(slot, items, GOING_ON)
        elif slot.slot == "start":
            _start(slot, items, contracts)
    for slot, items in step.view.find(Kind.REDUCED_GRAD):
        for microbatch, held in by_microbatch(items).items():
            _reduced(slot, microbatch, held, step, contracts)
    for slot, items in step.view.find(Kind.UNSCALED_GRAD):
        for microbatch, held in by_microbatch(items).items():
            _unscaled(slot, microbatch, held, step, contracts)


def _start(slot: Slot, items: tuple[Item, ...], contracts: Contracts) -> None:
    """Say that a window begins without gradients."""
    text = "a window begins without gradients"
    for item in items:
        if not readable(item):
            contracts.gap(slot, [item], NOT_READ)
            continue
        shape = item.entry.local_shape
        expected = computed(item, lambda shape=shape: [np.zeros(shape)])  # type: ignore[misc]
        contracts.found.append(
            Contract(slot, None, (item,), expected, own=beyond_number(0.0, item), text=text)
        )


def _reduced(
    slot: Slot, microbatch: int | None, items: tuple[Item, ...], step: Step, contracts: Contracts
) -> None:
    """Say that a reduced gradient is the sum or the mean of what ranks had before."""
    first = by_rank(items)[0]
    given = _given(slot.name, items, step)
    if not given or not readable(*items):
        contracts.gap(slot, items, NOT_READ)
        return
    mean = averages(first, step)
    if mean is None:
        contracts.gap(slot, items, OPERATION.format(op=first.entry.meta.op or "a collective"))
        return
    over = float(len(given)) if mean else 1.0
    terms = tuple(term._replace(over=over) for found in given.values() for term in found.terms)
    text = f"{'mean' if mean else 'sum'} over {len(given)} rank{'s' if len(given) > 1 else ''}"
    reads = reads_of(Sum(terms))
    add_sum(Contract(slot, microbatch, items, first, reads, text=text), Sum(terms), contracts)


def _given(name: str, items: tuple[Item, ...], step: Step) -> dict[int, Sum]:
    """Return what each cell of a reduction's ranks had before it; empty where that is not known of one."""
    ranks = set(items[0].entry.meta.ranks)
    parts = step.gradients.local_items(name)
    cells = {part.cell for part in parts if not ranks or ranks & set(part.ranks)}
    found: dict[int, Sum] = {}
    for cell in sorted(cells):
        own = [item for item in items if cell in item.ranks]
        before = rung_of_cell(name, cell, own[0] if own else items[0], step)
        if before is None:
            return {}
        found[cell] = before
    return found


def averages(item: Item, step: Step) -> bool | None:
    """Tell whether a reduction takes the mean over its ranks or their sum; None where nothing says it."""
    op = item.entry.meta.op or ""
    if op in _WRAPPERS:
        return True
    stated = {
        i.entry.meta.op or ""
        for slot, items in step.view.find(Kind.COLLECTIVE)
        for i in items
        if slot.name == op and set(i.entry.meta.ranks) == set(item.entry.meta.ranks)
    }
    known = {_PER_SUM.get(word.lower().rpartition(".")[2]) for word in stated}
    return known.pop() if len(known) == 1 else None


def _unscaled(
    slot: Slot, microbatch: int | None, items: tuple[Item, ...], step: Step, contracts: Contracts
) -> None:
    """Say that unscaling divides the loss scale out."""
    for item in items:
        before = rung_before(slot.name, item, step)
        if before is None or step.loss_scale is None or not readable(item):
            contracts.gap(slot, [item], NOT_READ)
            continue
        text = f"divided by the loss scale {step.loss_scale:g}"
        contract = Contract(slot, microbatch, (item,), item, reads_of(before), text=text)
        add_sum(contract, before.scaled(1 / step.loss_scale), contracts)


def reads_of(total: Sum) -> tuple[Ref, ...]:
    """Return the boundaries that a sum is made of."""
    entries = [term.item.entry for term in total.terms]
    return tuple(
        dict.fromkeys((e.microbatch, Slot("window", e.kind, e.name, e.slot, e.call)) for e in entries)
    )


def rung_before(name: str, item: Item, step: Step) -> Sum | None:
    """Return what a rank's gradient should be when an event finds it; None where that was not stored.

    That is what its last reduction, unscale or clip left, and what passes have added since; without any it
    is the rank's own sum, with what was left in ``.grad`` when the window began.
    """
    event = _event_before(name, item.source.rank, item, step)
    if event is None and any(p.cell != item.cell and p.cell in item.ranks for p in _parts(name, step)):
        return None  # ranks of other samples hold parts of it: their sum was not seen to be made
    return _since(name, item.cell, event, item, step)


def reduced_unseen(name: str, items: Sequence[Item], step: Step) -> bool:
    """Tell whether ranks of other samples hold one gradient that no recorded reduction made of their own."""
    parts = _parts(name, step)
    own = {part.cell: part.entry.digest for part in parts}
    if len(set(own.values())) < 2 or len(items) < 2 or len({item.entry.digest for item in items}) > 1:
        return False
    return any(_event_before(name, item.source.rank, item, step) is None for item in items)


def rung_of_cell(name: str, cell: int, item: Item, step: Step) -> Sum | None:
    """Return what one of the cells that a reduction joins had before it, as ``rung_before`` does."""
    event = _event_before(name, cell, item, step)
    if event is not None and len(event.ranks) > 1:
        event = None if event.entry.kind != Kind.REDUCED_GRAD else event
    return _since(name, cell, event, item, step)


def _parts(name: str, step: Step) -> list[Item]:
    return step.gradients.hooked_parts(name) or step.gradients.local_items(name)


def _since(name: str, cell: int, event: Item | None, item: Item, step: Step) -> Sum | None:
    """Return what an event left of a cell's gradient, and what its passes have added until another one."""
    last = math.inf if item.entry.microbatch is None else item.entry.microbatch
    since = -1 if event is None else event.entry.microbatch or 0
    own = [part for part in step.gradients.hooked_parts(name) if since < (part.entry.microbatch or 0) <= last]
    if event is None and last >= step.view.last_microbatch():
        own = own or step.gradients.local_items(name)
    parts = [*([event] if event else []), *(part for part in own if part.cell == cell)]
    if not parts or not readable(*parts):
        return None
    left = () if event else step.left_over(name)
    return Sum(tuple(Term(part) for part in (*parts, *(part for part in left if part.cell == cell))))


def _event_before(name: str, rank: int, item: Item, step: Step) -> Item | None:
    """Return a rank's gradient after its last event of the window before another one."""
    kinds = (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD)
    found = [
        i
        for kind in kinds
        for slot in step.view.named(kind, name)
        for i in step.view.items[slot]
        if slot.slot == "grad" and i.entry.microbatch is not None and rank in i.ranks
    ]
    until = dict(item.members).get(rank)
    if until is None:  # another rank's events: those of the same kind and call are as late
        return None
    earlier = [(dict(i.members)[rank].event, i) for i in found]
    mine = [(event, i) for event, i in earlier if event < until.event]
    return max(mine, key=lambda e: e[0])[1] if mine else None


def add_sum(contract: Contract, total: Sum, contracts: Contracts) -> None:
    """Add a contract whose expected value is a sum of recorded tensors."""
    first = by_rank(contract.actual)[0]
    shapes = {term.item.entry.local_shape for term in total.terms} | {first.entry.local_shape}
    if len(shapes) > 1:
        contracts.gap(contract.slot, contract.actual, "ranks hold parts of it that are not known to make it")
        return
    is_complex = first.entry.dtype.startswith("complex")
    expected = computed(first, total.blocks, dtype="complex128" if is_complex else "float64")
    contracts.found.append(
        Contract(
            contract.slot, contract.microbatch, contract.actual, expected, contract.reads,
            beyond_sum(total, first), contract.text,
        )
    )  # fmt: skip
