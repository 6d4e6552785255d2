"""What an update read and left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import coarser_eps, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import LARGE_ELEMENTS, Readable, item_blocks
from tensortrace.diff.update import (
    Hypers,
    UpdateInputs,
    amplification,
    is_factored,
    predict_param,
    predict_state,
)
from tensortrace.tracer.types import Kind


@dataclass(frozen=True)
class UpdateSource:
    """The recorded tensors around one update of one parameter, unread: see ``UpdateInputs``.

    Each has the parameter's shape or is a number, but for the sums of factored moments: these are read whole.
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
        return self.inputs(lambda item: as_real(item.read()))

    def blocks(self) -> Iterator[UpdateInputs]:
        """Yield everything block by block; numbers are in every block."""
        if is_factored(self.optimizer):
            yield self.read()
            return
        items = [self.param, self.gradient, *self.before.values(), *self.after.values()]
        elementwise = [item for item in items if item.entry.local_shape == self.shape]
        numbers = {id(item): item.read() for item in items if item.entry.local_shape != self.shape}
        for arrays in zip(*(item_blocks(item) for item in elementwise), strict=True):
            here = numbers | {id(item): array for item, array in zip(elementwise, arrays, strict=True)}
            yield self.inputs(lambda item, here=here: as_real(here[id(item)]))  # type: ignore[misc]

    def without_elements(self) -> UpdateInputs:
        """Return the inputs of a parameter of no elements: enough to see whether a formula is known."""
        if not self.shape:
            return self.read()  # the parameter is a number itself
        numbers = [i for i in (*self.before.values(), *self.after.values()) if not i.entry.local_shape]
        known = {id(item): item.read() for item in numbers}
        return self.inputs(lambda item: as_real(known.get(id(item), np.zeros(0))))

    def inputs(self, read: Callable[[Item], np.ndarray]) -> UpdateInputs:
        """Return the inputs, or blocks of them; ``read`` gives an item's, see ``as_real``."""
        return UpdateInputs(
            optimizer=self.optimizer,
            param=read(self.param),
            gradient=read(self.gradient),
            before={name: read(item) for name, item in self.before.items()},
            after={name: read(item) for name, item in self.after.items()},
            hypers=self.hypers,
            dtype=self.param.entry.dtype,
        )


def as_real(array: np.ndarray) -> np.ndarray:
    """Return an array in float64; complex numbers are pairs, as optimizers take them."""
    if array.dtype.kind != "c":
        return array.astype(np.float64)
    return np.stack([array.real, array.imag], axis=-1).astype(np.float64)


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


def expected(slot: Slot, inputs: UpdateInputs) -> np.ndarray | None:
    """Return what a formula makes of a parameter or a state; None where it is not known."""
    return predict_param(inputs) if slot.kind == Kind.PARAM else predict_state(inputs, slot.slot)


def predicts(slot: Slot, source: UpdateSource) -> bool:
    """Tell whether the formula of an update is known; of factored moments, whose tensors are small enough."""
    if not is_factored(source.optimizer):
        return expected(slot, source.without_elements()) is not None
    return math.prod(source.shape) <= LARGE_ELEMENTS and expected(slot, source.read()) is not None


def beside(source: UpdateSource, actual: Readable) -> Iterator[tuple[UpdateInputs, np.ndarray]]:
    """Yield an update's inputs with a value that it left, block by block."""
    if is_factored(source.optimizer):
        yield source.read(), as_real(actual.read())
    elif actual.shape != source.shape:  # a number beside the parameter
        yield source.without_elements(), as_real(actual.read())
    else:
        for inputs, value in zip(source.blocks(), actual.blocks(), strict=True):
            yield inputs, as_real(value)


def residues(slot: Slot, source: UpdateSource, actual: Readable) -> Iterator[Sides]:
    """Yield block by block what the formula leaves of a value, and the magnitude of its terms."""
    for inputs, value in beside(source, actual):
        made = expected(slot, inputs)
        assert made is not None  # the formula is known
        terms = np.fmax(np.abs(value), _terms(slot, inputs)) * amplified(slot, inputs)
        yield unexplained(value, made), terms


def amplified(slot: Slot, inputs: UpdateInputs) -> np.ndarray:
    """Return by how much the round-off of what an update leaves is greater than that of the terms it sums."""
    own = slot.kind == Kind.PARAM or slot.slot == "momentum_buffer"
    return amplification(inputs) if own else np.ones(())


def unexplained(actual: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Return what is there less what is expected; 0 where the formula says as well that it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.asarray(actual - made)
        if math.isfinite(float(np.vdot(difference, difference).real)):
            return difference  # all elements are finite
    return np.where(np.isfinite(actual) | np.isfinite(made), difference, 0.0)


def _terms(slot: Slot, inputs: UpdateInputs) -> np.ndarray:
    """Return the magnitude of the terms that an element of the result sums."""
    if slot.kind == Kind.PARAM:
        change = predict_param(inputs)
        assert change is not None  # it was predicted before
        return np.asarray(np.abs(inputs.param) + np.abs(change - inputs.param))
    terms = predict_state(inputs.magnitudes(), slot.slot)
    assert terms is not None
    return terms


def update_source(name: str, view: StepView, before: StepView) -> UpdateSource | None:
    """Return what the update of one parameter read and left, None where a part was not recorded."""
    consumed = [
        i
        for i in view.items.get(window_slot(Kind.CLIPPED_GRAD, name, "grad"), ())
        if i.entry.microbatch is None
    ]
    param = view.began_with(name, before)
    hypers, optimizer = hyperparameters(name, view)
    if not consumed or not param or not hypers or skipped(view):
        return None
    shape = replica(param).entry.local_shape
    before_, after = _states(name, before), _states(name, view)
    if after and not before_ and _begins_late(view, before):
        return None
    states = [item.entry.local_shape for state in (before_, after) for item in state.values()]
    states = [] if is_factored(optimizer) else list(filter(None, states))
    if any(found != shape for found in (replica(consumed).entry.local_shape, *states)):
        return None  # factored moments of no known formula, or parts of no known layout
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
