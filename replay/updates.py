"""Contracts of the update: state and parameters are what the formula makes of what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import by_rank, replica
from tensortrace.diff.plan.updates import (
    UpdateSource,
    expected,
    hyperparameters,
    predicts,
    skipped,
    update_source,
)
from tensortrace.diff.update import has_formula, is_factored
from tensortrace.replay.computed import Blocks, computed, number_of, same_as
from tensortrace.replay.contract import Contract, Contracts, Ref, Step, readable
from tensortrace.replay.rounding import beyond_formula
from tensortrace.tracer.types import Kind

SEVERAL = "its optimizer makes several updates in one window"
SCALED = "its gradient still carries the loss scale, which a fused optimizer divides out itself"
NOT_READ = "values that its update read, or left, were not recorded"
NO_OPTIMIZER = "no optimizer was seen to update it"


def updates(step: Step, contracts: Contracts) -> None:
    """Add the contracts of all parameters that an optimizer holds, and say of what there are none."""
    owners = _owners(step)
    kinds = (Kind.OPTIMIZER_STATE, Kind.PARAM)
    for name in dict.fromkeys(slot.name for kind in kinds for slot, _ in step.view.find(kind)):
        slots = [*step.view.named(Kind.OPTIMIZER_STATE, name), *step.view.named(Kind.PARAM, name)]
        slots = [slot for slot in slots if slot.kind != Kind.PARAM or slot.slot == "model"]
        if name not in owners:
            for slot in slots:
                contracts.gap(slot, step.view.items[slot], NO_OPTIMIZER)
        elif any(slot.call for slot in slots) or len(owners[name]) > 1:
            for slot in slots:
                contracts.gap(slot, step.view.items[slot], SEVERAL)
        else:
            _of_parameter(name, slots, step, contracts)


def _owners(step: Step) -> dict[str, set[str]]:
    """Return the optimizers that hold each parameter."""
    found: dict[str, set[str]] = {}
    for slot, items in step.view.find(Kind.SCHEDULE):
        for member in (m for item in items for m in item.entry.meta.members):
            found.setdefault(member, set()).add(slot.name.partition(".group.")[0])
    return found


def _of_parameter(name: str, slots: Sequence[Slot], step: Step, contracts: Contracts) -> None:
    optimizer = hyperparameters(name, step.view)[1]
    still = skipped(step.view) or not step.gradients.consumed_copies(name)
    source = None if still else update_source(name, step.view, step.before)
    scaled = step.loss_scale not in (None, 1.0) and not step.gradients.has_rung(Kind.UNSCALED_GRAD)
    for slot in slots:
        items = step.view.items[slot]
        if still:
            _unchanged(slot, items, step, contracts)
        elif not has_formula(optimizer):
            contracts.gap(slot, items, f"the formula of {optimizer or 'its optimizer'} is not known")
        elif scaled:
            contracts.gap(slot, items, SCALED)
        elif source is None or not _stored(source) or not readable(*items):
            contracts.gap(slot, items, NOT_READ)
        elif not predicts(slot, source):
            contracts.gap(slot, items, f"{optimizer} follows no formula here, or lacks values that it reads")
        else:
            contracts.found.append(_contract(slot, items, source))


def _stored(source: UpdateSource) -> bool:
    return readable(source.param, source.gradient, *source.before.values(), *source.after.values())


def _contract(slot: Slot, items: tuple[Item, ...], source: UpdateSource) -> Contract:
    actual = by_rank(items)[0]
    text = f"by the formula of {source.optimizer}"
    if slot.slot == "step":
        count = float(np.ravel(source.before["step"].read())[0]) if "step" in source.before else 0.0
        made = number_of(actual, count + 1)
        return Contract(slot, None, items, made, _reads(slot, source), text=text)
    made = computed(actual, _blocks(slot, source, actual))
    return Contract(slot, None, items, made, _reads(slot, source), beyond_formula(slot, source, actual), text)


def _blocks(slot: Slot, source: UpdateSource, actual: Item) -> Blocks:
    """Return how to compute what the formula gives, in the parameter's blocks."""
    is_complex = actual.entry.dtype.startswith("complex")

    def blocks() -> Iterator[np.ndarray]:
        number = actual.entry.local_shape != source.shape and not is_factored(source.optimizer)
        for inputs in [source.without_elements()] if number else source.blocks():
            made = expected(slot, inputs)
            assert made is not None  # asked before
            yield made[..., 0] + 1j * made[..., 1] if is_complex else made

    return blocks


def _reads(slot: Slot, source: UpdateSource) -> tuple[Ref, ...]:
    """Return what an update was computed from in its own step."""
    name = slot.name
    found: list[Ref] = [(None, window_slot(Kind.CLIPPED_GRAD, name, "grad"))]
    if slot.kind == Kind.PARAM:
        found += [(None, window_slot(Kind.OPTIMIZER_STATE, name, state)) for state in source.after]
    return tuple(found)


def _unchanged(slot: Slot, items: tuple[Item, ...], step: Step, contracts: Contracts) -> None:
    """Say that a step that was skipped, or a parameter without a gradient, leaves everything as it was."""
    start = step.view.items.get(slot._replace(slot="start"), ()) if slot.kind == Kind.PARAM else ()
    before = start or step.before.items.get(slot, ())
    if not before:
        contracts.gap(slot, items, NOT_READ)
        return
    text = "no update was made: it is what it was"
    contracts.found.append(Contract(slot, None, items, same_as(items[0], replica(before)), text=text))
