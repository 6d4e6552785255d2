"""Contracts of clipping: what is clipped, its norm, the coefficient, what the optimizer consumes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.compare import EPS, Sides
from tensortrace.diff.factors import projected
from tensortrace.diff.gradients import CLIP
from tensortrace.diff.plan.clips import ClipEvent, clip_events, early_events, window_slot
from tensortrace.diff.plan.comparison import OneSided, by_rank, coarser_eps
from tensortrace.diff.plan.updates import as_real, unexplained
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.scale import WEIGHT_TOLERANCE
from tensortrace.diff.stream import Sum, Term, one
from tensortrace.diff.tolerance import judge_own, measure_streamed
from tensortrace.replay.computed import computed, number_of
from tensortrace.replay.contract import (
    Contract,
    Contracts,
    Ref,
    Step,
    beyond_number,
    beyond_sum,
    readable,
)
from tensortrace.replay.gradients import (
    NOT_READ,
    add_sum,
    averages,
    reads_of,
    reduced_unseen,
    rung_before,
)
from tensortrace.tracer.types import Kind

UNPLACED = "it is of tensors that ranks hold in parts of no known layout"
UNSEEN = "ranks hold one gradient, of operations that were not recorded as its reduction"
SETTING = "a setting of the clip"
BY_PROGRAM = "code of the program changes gradients before they are consumed, by no common factor"
LATE = "clipping comes after the optimizer has consumed the gradients, which it was to clip"
EARLY = "clipping comes before the window's last microbatch: it should come after all of them"

_TORCHS_EPSILON = 1e-6
"""What torch adds to the norm before it divides by it."""

_SAMPLED = 32
"""Of how many parameters it is measured what the program multiplies gradients by."""


def clipping(step: Step, contracts: Contracts) -> None:
    """Add the contracts of every clip, and of what the optimizer consumes."""
    early = {event.call for event in early_events(step.view)}
    events = clip_events(step.view)
    for event in events:
        if event.call in early:
            slot = window_slot(Kind.CLIPPED_GRAD, CLIP, "total_norm", event.call)
            held = event.held.get("total_norm", next(iter(event.held.values())))
            contracts.odd.append(OneSided("b", slot, event.microbatch, held, EARLY, diverges=True))
        elif _is_late(event, step):
            slot = window_slot(Kind.CLIPPED_GRAD, CLIP, "total_norm", event.call)
            held = event.held.get("total_norm", next(iter(event.held.values())))
            contracts.odd.append(OneSided("b", slot, event.microbatch, held, LATE, diverges=True))
        _of_event(event, step, contracts, norm=event.call not in early)
    factors = _factors_of_program(step, events)
    told = dict.fromkeys(factor for factor in factors.values() if factor is not None and factor != 1.0)
    if told:
        by = ", ".join(f"{factor:.6g}" for factor in list(told)[:4])
        contracts.notes.append(f"the program multiplies its gradients by {by} before they are consumed")
    for name in step.gradients.names:
        _of_parameter(name, events, factors, step, contracts)


def _is_late(event: ClipEvent, step: Step) -> bool:
    """Tell whether a clip changed gradients only when their optimizers had consumed all of them."""
    changed = False
    for name in _members(event):
        before, consumed = (
            step.view.items.get(_before(name, event.call), ()), step.gradients.consumed_copies(name)
        )  # fmt: skip
        last: dict[int, int] = {}
        for item in consumed:
            for rank, entry in item.members:
                last[rank] = max(entry.event, last.get(rank, -1))
        given = {rank: entry for item in before for rank, entry in item.members}
        if not given or any(entry.event < last.get(rank, math.inf) for rank, entry in given.items()):
            return False
        after = step.view.items.get(_before(name, event.call)._replace(slot="grad"), ())
        left = {rank: entry.digest for item in after for rank, entry in item.members}
        changed = changed or any(left.get(rank, e.digest) != e.digest for rank, e in given.items())
    return changed


def _members(event: ClipEvent) -> tuple[str, ...]:
    held = next(iter(event.held.values()))
    return tuple(dict.fromkeys(name for item in held for name in item.entry.meta.members))


def _of_event(event: ClipEvent, step: Step, contracts: Contracts, *, norm: bool) -> None:
    """Say what a clip's norm and coefficient are, on each rank; its settings were given."""
    for name, items in event.held.items():
        slot = window_slot(Kind.CLIPPED_GRAD, CLIP, name, event.call)
        if name in ("max_norm", "norm_type"):
            contracts.gap(slot, items, SETTING)
        elif name == "total_norm" and norm:
            _norm(slot, items, event, step, contracts)
        elif name == "coefficient":
            _coefficient(slot, items, event, _units(event, step), contracts)


def _norm(slot: Slot, items: tuple[Item, ...], event: ClipEvent, step: Step, contracts: Contracts) -> None:
    """Say that a clip goes by the norm of all gradients, whole and unscaled."""
    members = [(n, by_rank(step.view.items.get(_before(n, event.call), ()))) for n in _members(event)]
    kind = event.scalars.get("norm_type")
    held = [item for _, copies in members for item in copies]
    if step.unplaced.intersection(name for name, _ in members):
        contracts.gap(slot, items, UNPLACED)
        return
    if not members or not all(copies for _, copies in members) or not readable(*held, *items):
        contracts.gap(slot, items, NOT_READ)
        return
    order = float(kind.read()) if kind is not None else 2.0
    whole = [_whole(name, copies, step) for name, copies in members]
    made = _norm_of(whole, order) / (step.gradients.clipped_scale or 1.0)
    elements = sum(math.prod(found.shape) for found in whole)
    units = _units(event, step) * (1 + 0.01 * math.sqrt(elements))
    reads: tuple[Ref, ...] = tuple((event.microbatch, _before(name, event.call)) for name, _ in members)
    worst = max(by_rank(items), key=lambda item: abs(float(item.read()) - made))
    same = len({item.entry.digest for item in items}) == 1
    contracts.found.append(
        Contract(
            slot, worst.entry.microbatch, items if same else (worst,), number_of(worst, made), reads,
            beyond_number(made, worst, units), "the norm of all gradients",
        )
    )  # fmt: skip


def _whole(name: str, copies: tuple[Item, ...], step: Step) -> Sum:
    """Return a gradient whole: one of equal copies, or what a reduction will make of ranks' own."""
    if not odd_ranks(copies):
        return one(copies[0])
    reduced = step.gradients.rung(Kind.REDUCED_GRAD, name)
    summed = reduced is not None and averages(reduced, step) is False
    return Sum(tuple(Term(item, 1.0, 1.0 if summed else float(len(copies))) for item in copies))


def _units(event: ClipEvent, step: Step) -> float:
    """Return the spacings of float32 in one of the gradients' dtype, in which a clip computes its numbers."""
    slots = (_before(name, event.call) for name in _members(event))
    items = [item for slot in slots for item in step.view.items.get(slot, ())]
    return max(coarser_eps(items), EPS["float32"]) / EPS["float32"]


def _norm_of(tensors: list[Sum], order: float) -> float:
    blocks = (block for tensor in tensors for block in tensor.blocks())
    wide = (b.astype(np.complex128 if b.dtype.kind == "c" else np.float64) for b in blocks)
    if math.isinf(order):
        return max((float(np.max(np.abs(block), initial=0.0)) for block in wide), default=0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum(float(np.sum(np.abs(block) ** order)) for block in wide)
    return total ** (1 / order) if order else math.nan


def _before(name: str, call: int) -> Slot:
    return window_slot(Kind.CLIPPED_GRAD, name, "before", call)


def _coefficient(
    slot: Slot, items: tuple[Item, ...], event: ClipEvent, units: float, contracts: Contracts
) -> None:
    """Say that gradients are multiplied by limit / norm, where that is less than 1."""
    norms = {item.source.rank: item for item in event.held.get("total_norm", ())}
    limit = event.scalars.get("max_norm")
    for item in items:
        norm = norms.get(item.source.rank)
        if norm is None or limit is None or not readable(norm, limit, item):
            contracts.gap(slot, [item], NOT_READ)
            continue
        made = min(1.0, float(limit.read()) / (float(norm.read()) + _TORCHS_EPSILON))
        reads = ((item.entry.microbatch, slot._replace(slot="total_norm")),)
        own = beyond_number(made, item, units)
        contracts.found.append(
            Contract(slot, item.entry.microbatch, (item,), number_of(item, made), reads, own)
        )


def _factors_of_program(step: Step, events: tuple[ClipEvent, ...]) -> dict[int, float | None]:
    """Return by what the program multiplies each rank's gradients behind their last rung, 1 if not.

    None where it changes most of them otherwise.
    """
    call = events[-1].call if events else None
    found: dict[int, list[float]] = {}
    pairs: dict[int, list[tuple[Sum, Item]]] = {}
    close = WEIGHT_TOLERANCE
    for name in step.gradients.names[:_SAMPLED]:
        copies = _unclipped(name, call, step)
        for item in () if reduced_unseen(name, copies, step) else copies:
            before = rung_before(name, item, step)
            if before is None or before.shape != item.entry.local_shape:
                continue
            factor = projected(before, one(item))
            if factor is not None:
                found.setdefault(item.source.rank, []).append(factor)
                pairs.setdefault(item.source.rank, []).append((before, item))
                close = max(close, coarser_eps((item,)))
    common = {rank: _common(factors, close) for rank, factors in found.items()}
    return {rank: factor if _explains(factor, pairs[rank]) else None for rank, factor in common.items()}


def _explains(factor: float | None, pairs: Sequence[tuple[Sum, Item]]) -> bool:
    """Tell whether a factor that was fitted to gradients makes most of them, within what they are allowed."""
    if factor is None:
        return False
    made = 0
    for before, item in pairs:
        scaled = before if factor == 1.0 else before.scaled(factor)
        judgement = judge_own(measure_streamed(beyond_sum(scaled, item)), coarser_eps((item,)))
        made += judgement.ratio <= 1.0
    return made > 0.5 * len(pairs)


def _common(factors: list[float], close: float) -> float | None:
    """Return the factor that most gradients have, 1 where it is close to that; None without one."""
    median = float(np.median(factors))
    if not np.mean([math.isclose(factor, median, rel_tol=close) for factor in factors]) > 0.5:
        return None
    return 1.0 if math.isclose(median, 1.0, rel_tol=close) else median


def _unclipped(name: str, call: int | None, step: Step) -> tuple[Item, ...]:
    """Return each rank's gradient before the last clip, or without one as it is consumed."""
    items = step.view.items.get(_before(name, call), ()) if call is not None else ()
    copies = items or step.gradients.consumed_copies(name)
    return by_rank(copies) if copies and readable(*copies) else ()


def _of_parameter(
    name: str,
    events: tuple[ClipEvent, ...],
    factors: Mapping[int, float | None],
    step: Step,
    contracts: Contracts,
) -> None:
    """Say what each clip was given and left of a gradient, and what the optimizer consumes."""
    multiplied = factors
    for event in events:
        slot = _before(name, event.call)
        before = step.view.items.get(slot, ())
        if before:
            _as_rung(slot, before, multiplied, step, contracts)
            multiplied = {}
        after = slot._replace(slot="grad")
        for item in step.view.items.get(after, ()):
            if item.entry.microbatch is not None:
                _clipped(after, item, before, event, contracts)
    slot = window_slot(Kind.CLIPPED_GRAD, name, "grad")
    consumed = tuple(i for i in step.view.items.get(slot, ()) if i.entry.microbatch is None)
    if consumed:
        _as_rung(slot, consumed, multiplied, step, contracts)


def _as_rung(
    slot: Slot,
    items: tuple[Item, ...],
    factors: Mapping[int, float | None],
    step: Step,
    contracts: Contracts,
) -> None:
    """Say that a gradient is what the last event left, times the program's own factor on the rank."""
    if reduced_unseen(slot.name, items, step):
        contracts.gap(slot, items, UNSEEN)
        return
    for item in items:
        before, factor = rung_before(slot.name, item, step), factors.get(item.source.rank, 1.0)
        if before is None or not readable(item):
            contracts.gap(slot, [item], NOT_READ)
        elif factor is None:
            contracts.gap(slot, [item], BY_PROGRAM)
        else:
            kind = before.terms[0].item.entry.kind
            scaled = before if factor == 1.0 else before.scaled(factor)
            text = f"what the {kind} left" + (f", times {factor:.6g}" if factor != 1.0 else "")
            reads = reads_of(before)
            contract = Contract(slot, item.entry.microbatch, (item,), item, reads, text=text)
            add_sum(contract, scaled, contracts)


def _clipped(
    slot: Slot, item: Item, before: tuple[Item, ...], event: ClipEvent, contracts: Contracts
) -> None:
    """Say that clipping multiplies a gradient by its coefficient, or cuts it off at its limit."""
    given = next((i for i in before if i.source.rank == item.source.rank), None)
    coefficients = {i.source.rank: i for i in event.held.get("coefficient", ())}
    limit, coefficient = event.scalars.get("max_norm"), coefficients.get(item.source.rank)
    by_value = any(i.entry.meta.op == "clip_grad_value_" for i in next(iter(event.held.values())))
    number = limit if by_value else coefficient
    if given is None or number is None or not readable(item, given, number):
        contracts.gap(slot, [item], NOT_READ)
        return
    value, microbatch = float(number.read()), item.entry.microbatch
    reads: tuple[Ref, ...] = ((microbatch, _before(slot.name, slot.call)),)
    if not by_value:
        reads = (*reads, (microbatch, window_slot(Kind.CLIPPED_GRAD, CLIP, "coefficient", event.call)))
        total = Sum((Term(given, value),)) if value != 1.0 else Sum((Term(given),))
        contract = Contract(slot, microbatch, (item,), item, reads, text="times the coefficient of the clip")
        add_sum(contract, total, contracts)
        return
    make = partial(_cut_off, given, value)
    expected = computed(item, make, dtype=item.entry.dtype)
    own = partial(_beyond_cut, given, value, item)
    text = f"cut off at {value:g}"
    contracts.found.append(Contract(slot, microbatch, (item,), expected, reads, own, text))


def _cut_off(given: Item, limit: float) -> Iterator[np.ndarray]:
    for block in one(given).blocks():
        yield np.clip(block, -limit, limit)


def _beyond_cut(given: Item, limit: float, actual: Item) -> Iterator[Sides]:
    for made, value in zip(_cut_off(given, limit), one(actual).blocks(), strict=True):
        there = as_real(value)
        yield unexplained(there, as_real(made)), np.abs(there)
