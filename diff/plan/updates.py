"""What an update read and left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import coarser_eps, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.update import Hypers, UpdateInputs
from tensortrace.tracer.types import Kind


@dataclass(frozen=True)
class UpdateSource:
    """The recorded tensors around one update of one parameter, unread: see ``UpdateInputs``.

    Each has the parameter's shape or is a number.
    """

    optimizer: str
    param: Item
    gradient: Item
    before: Mapping[str, Item]
    after: Mapping[str, Item]
    hypers: Hypers

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.param.entry.local_shape

    def read(self) -> UpdateInputs:
        """Return everything as float64 arrays."""
        return self.inputs(lambda item: item.read().astype(np.float64))

    def without_elements(self) -> UpdateInputs:
        """Return the inputs of a parameter of no elements: enough to see whether a formula is known."""
        if not self.shape:
            return self.read()  # the parameter is a number itself
        numbers = [i for i in (*self.before.values(), *self.after.values()) if not i.entry.local_shape]
        known = {id(item): item.read() for item in numbers}
        return self.inputs(lambda item: known.get(id(item), np.zeros(0)).astype(np.float64))

    def inputs(self, read: Callable[[Item], np.ndarray]) -> UpdateInputs:
        """Return the inputs, or blocks of them; ``read`` gives an item's as float64."""
        return UpdateInputs(
            optimizer=self.optimizer,
            param=read(self.param),
            gradient=read(self.gradient),
            before={name: read(item) for name, item in self.before.items()},
            after={name: read(item) for name, item in self.after.items()},
            hypers=self.hypers,
        )


NOISE = 2.0**10
"""Units of round-off by which an element's gradients may differ and still say which way it is updated."""


def without_noise(slot: Slot, pair: StepPair, loaded: Assembled) -> Assembled | None:
    """Return both sides of a state with the elements made equal whose gradients are round-off alone.

    Where terms cancel (the bias of attention keys, in theory without a gradient) correct runs consume other
    noise, and an optimizer that normalises makes whole steps of it. None where no element is so.
    """
    a, b = pair.gradients_a.consumed(slot.name), pair.gradients_b.consumed(slot.name)
    if a is None or b is None or not a.entry.local_shape == b.entry.local_shape == loaded.shape:
        return None
    left, right = a.read().astype(np.float64), b.read().astype(np.float64)
    eps = coarser_eps((a, b))
    with np.errstate(invalid="ignore"):
        noise = np.abs(right - left) > NOISE * eps * np.maximum(np.abs(left), np.abs(right))
    if not noise.any():
        return None
    return Assembled(loaded.a, np.where(noise, loaded.a, loaded.b))


def update_source(name: str, view: StepView, before: StepView) -> UpdateSource | None:
    """Return what the update of one parameter read and left, None where a part was not recorded."""
    consumed = [
        i
        for i in view.items.get(window_slot(Kind.CLIPPED_GRAD, name, "grad"), ())
        if i.entry.microbatch is None
    ]
    start = view.items.get(window_slot(Kind.PARAM, name, "start"), ())
    param = start or before.items.get(window_slot(Kind.PARAM, name, "model"), ())
    hypers, optimizer = hyperparameters(name, view)
    if not consumed or not param or not hypers or skipped(view):
        return None
    shape = replica(param).entry.local_shape
    before_, after = _states(name, before), _states(name, view)
    if after and not before_ and _begins_late(view, before):
        return None
    states = [item.entry.local_shape for state in (before_, after) for item in state.values()]
    if any(found != shape for found in (replica(consumed).entry.local_shape, *filter(None, states))):
        return None  # factored moments, or parts of no known layout: no formula of ours
    return UpdateSource(optimizer, replica(param), replica(consumed), before_, after, hypers)


def _begins_late(view: StepView, before: StepView) -> bool:
    """Tell whether the recording begins at this step: what the optimizer's state was before is not known."""
    recorded = any(slot.kind == Kind.OPTIMIZER_STATE for slot in before.items)
    return view.step > 0 and before.step < view.step - 1 and not recorded


def update_inputs(name: str, view: StepView, before: StepView) -> UpdateInputs | None:
    """Return the arrays of ``update_source``."""
    source = update_source(name, view, before)
    return source.read() if source else None


def _states(name: str, view: StepView) -> dict[str, Item]:
    return {
        slot.slot: replica(view.items[slot])
        for slot in view.named(Kind.OPTIMIZER_STATE, name)
        if slot.call == 0
    }


def hyperparameters(name: str, view: StepView, call: int = 0) -> tuple[dict[str, float], str]:
    """Return the hyperparameters in force for a parameter, and the class of its optimizer."""
    found: dict[str, float] = {}
    optimizer = ""
    for slot, mine in view.of_member(name).items():  # pipeline stages have groups of their own
        if slot.call == call:
            found[slot.slot] = view.number(replica(mine))
            optimizer = mine[0].entry.meta.optimizer or optimizer
    return found, optimizer


def skipped(view: StepView) -> bool:
    """Tell whether an optimizer skipped its step in this window."""
    items = [i for s, found in view.find(Kind.SCHEDULE) if s.slot == "skipped" for i in found]
    return any(int(view.number(i)) for i in items)
