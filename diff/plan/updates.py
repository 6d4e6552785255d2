"""What an update read and left, and how much of a difference its formula explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import coarser_eps, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import block_size, item_blocks, one
from tensortrace.diff.update import Hypers, UpdateInputs, amplification, predict_param, predict_state
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
        return self._inputs(lambda item: item.read())

    def blocks(self) -> Iterator[UpdateInputs]:
        """Yield everything block by block; numbers are in every block."""
        items = [self.param, self.gradient, *self.before.values(), *self.after.values()]
        elementwise = [item for item in items if item.entry.local_shape == self.shape]
        numbers = {id(item): item.read() for item in items if item.entry.local_shape != self.shape}
        for arrays in zip(*(item_blocks(item) for item in elementwise), strict=True):
            here = numbers | {id(item): array for item, array in zip(elementwise, arrays, strict=True)}
            yield self._inputs(lambda item, here=here: here[id(item)])  # type: ignore[misc]

    def without_elements(self) -> UpdateInputs:
        """Return the inputs of a parameter of no elements: enough to see whether a formula is known."""
        if not self.shape:
            return self.read()  # the parameter is a number itself
        numbers = [i for i in (*self.before.values(), *self.after.values()) if not i.entry.local_shape]
        known = {id(item): item.read() for item in numbers}
        return self._inputs(lambda item: known.get(id(item), np.zeros(0)))

    def _inputs(self, read: Callable[[Item], np.ndarray]) -> UpdateInputs:
        return UpdateInputs(
            optimizer=self.optimizer,
            param=read(self.param).astype(np.float64),
            gradient=read(self.gradient).astype(np.float64),
            before={name: read(item).astype(np.float64) for name, item in self.before.items()},
            after={name: read(item).astype(np.float64) for name, item in self.after.items()},
            hypers=self.hypers,
        )


def own_error(slot: Slot, pair: StepPair) -> Callable[[], Callable[[], Iterable[Sides]] | None] | None:
    """Return how to compute what of a difference the recorded inputs of the update do not explain.

    The result gives blocks of the unexplained difference and of the size of the terms summed.
    """
    if slot.kind == Kind.BUFFER or slot.slot == "start" or slot.call:
        return None

    def own() -> Callable[[], Iterable[Sides]] | None:
        source_a = update_source(slot.name, pair.a, pair.before_a)
        source_b = update_source(slot.name, pair.b, pair.before_b)
        if source_a is None or source_b is None:
            return None
        actual = [one(replica(view.items[slot])) for view in (pair.a, pair.b)]
        if any(shape != source_a.shape for shape in (source_b.shape, *(x.shape for x in actual))):
            return None
        if any(_expected(slot, source.without_elements()) is None for source in (source_a, source_b)):
            return None

        def blocks() -> Iterator[Sides]:
            a, b = actual
            found = zip(source_a.blocks(), a.blocks(), source_b.blocks(), b.blocks(), strict=True)
            for inputs_a, value_a, inputs_b, value_b in found:
                error_a, size_a = _residue(slot, inputs_a, value_a)
                error_b, size_b = _residue(slot, inputs_b, value_b)
                yield error_b - error_a, np.fmax(size_a, size_b)  # NaN in one run: so large as in the other

        if math.prod(source_a.shape) > block_size(source_a.shape):
            return blocks
        kept = list(blocks())  # gone through twice
        return lambda: kept

    return own


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


def _expected(slot: Slot, inputs: UpdateInputs) -> np.ndarray | None:
    return predict_param(inputs) if slot.kind == Kind.PARAM else predict_state(inputs, slot.slot)


def _residue(slot: Slot, inputs: UpdateInputs, actual: np.ndarray) -> Sides:
    """Return what the formula leaves of a value, and the magnitude of the terms that it sums."""
    expected = _expected(slot, inputs)
    assert expected is not None  # the formula is known
    wide = actual.astype(np.float64)
    terms = np.fmax(np.abs(wide), _terms(slot, inputs))
    if slot.kind == Kind.PARAM or slot.slot == "momentum_buffer":
        terms = terms * amplification(inputs)
    return _unexplained(wide, expected), terms


def _unexplained(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return actual − expected; 0 where the formula says as well that the element is not finite."""
    with np.errstate(invalid="ignore"):
        difference = np.asarray(actual - expected)
    return np.where(np.isfinite(actual) | np.isfinite(expected), difference, 0.0)


def _terms(slot: Slot, inputs: UpdateInputs) -> np.ndarray:
    """Return the magnitude of the terms that an element of the result sums."""
    if slot.kind == Kind.PARAM:
        change = predict_param(inputs)
        assert change is not None  # it was predicted before
        return np.asarray(np.abs(inputs.param) + np.abs(change - inputs.param))
    sizes = UpdateInputs(  # the formula of the magnitudes is the magnitude of its terms
        optimizer=inputs.optimizer,
        param=np.abs(inputs.param),
        gradient=np.abs(inputs.gradient),
        before={k: np.abs(v) for k, v in inputs.before.items()},
        after=inputs.after,
        hypers={**inputs.hypers, "maximize": 0.0},
    )
    terms = predict_state(sizes, slot.slot)
    assert terms is not None
    return terms


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
    for slot, items in view.find(Kind.SCHEDULE):
        mine = [i for i in items if name in i.entry.meta.members]  # pipeline stages have groups of their own
        if slot.call == call and mine:
            found[slot.slot] = float(replica(mine).read())
            optimizer = mine[0].entry.meta.optimizer or optimizer
    return found, optimizer


def skipped(view: StepView) -> bool:
    """Tell whether an optimizer skipped its step in this window."""
    items = [i for s, found in view.find(Kind.SCHEDULE) if s.slot == "skipped" for i in found]
    return any(int(i.read()) for i in items)
