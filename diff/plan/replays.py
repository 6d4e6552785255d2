"""How much of what an update left differs beyond what its recorded inputs explain by its formula.

What one update read serves all that it left: its moments and its parameter are computed again together, in
one pass through the recorded tensors, some ten thousand elements at a time, which stay in the processor's
cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.updates import (
    UpdateSource,
    amplified,
    as_real,
    expected,
    predicts,
    residues,
    unexplained,
    update_source,
)
from tensortrace.diff.stream import PASSED_ELEMENTS, item_blocks, one, whole_blocks
from tensortrace.diff.tolerance import Unexplained, least_size, measure_unexplained, worst_beside
from tensortrace.diff.update import UpdateInputs, is_factored
from tensortrace.tracer.types import Kind

PIECE = 1 << 15
"""Elements that are computed at a time: of fewer, calling numpy costs as much as the arithmetic."""

_NEARLY = 0.9
"""What is known of the least size while it is being measured, over what it turns out to be."""

_SMALL = 2.0**-100
"""The mean square from which on, and up to whose inverse, float32 is taken for the sizes of terms."""

_KINDS = (Kind.PARAM, Kind.OPTIMIZER_STATE)


class Replays:
    """The updates of one step, each computed again once, when the first thing that it left is asked for."""

    def __init__(self, pair: StepPair) -> None:
        self._pair = pair
        self._found: dict[Slot, Unexplained] = {}

    def of(self, slot: Slot) -> Callable[[], Unexplained | None] | None:
        """Return how to measure what of a difference the recorded inputs of the update do not explain.

        The result is None where the inputs were not all recorded, or no formula is known.
        """
        if slot.kind not in _KINDS or slot.slot == "start" or slot.call:
            return None
        return partial(self._unexplained, slot)

    def _unexplained(self, slot: Slot) -> Unexplained | None:
        if slot not in self._found:
            views = ((self._pair.a, self._pair.before_a), (self._pair.b, self._pair.before_b))
            sources = [update_source(slot.name, *of_run) for of_run in views]
            if sources[0] is None or sources[1] is None:
                return None
            runs = [_Run(source, view) for source, (view, _) in zip(sources, views, strict=True) if source]
            if any(run.is_whole(slot) for run in runs):
                return _replay_whole(slot, runs[0], runs[1])
            slots = [s for s in self._left(slot) if all(run.explains(s) for run in runs)]
            if slot not in slots or runs[0].source.shape != runs[1].source.shape:
                return None
            self._found |= _replay(slots, runs[0], runs[1])
        return self._found[slot]

    def _left(self, slot: Slot) -> list[Slot]:
        """Return what the update of a parameter left that is told from the other run, ``slot`` first."""
        found = [slot]
        for kind in _KINDS:
            for other in self._pair.a.named(kind, slot.name):
                a, b = (view.items.get(other, ()) for view in (self._pair.a, self._pair.b))
                if other == slot or not a or not b or self.of(other) is None:
                    continue
                x, y = replica(a), replica(b)
                there = all(item.source.stored(item.entry) for item in (x, y))  # else only it is not judged
                if there and x.entry.digest != y.entry.digest:
                    found.append(other)
        return found


class _Run:
    """What the update of one parameter read and left in one run."""

    def __init__(self, source: UpdateSource, view: StepView) -> None:
        self.source = source
        self._view = view

    def explains(self, slot: Slot) -> bool:
        """Tell whether what the update left is of the parameter's shape, and its formula known."""
        if self.is_whole(slot) or self.left(slot).entry.local_shape != self.source.shape:
            return False
        return expected(slot, self._without_elements) is not None

    def is_whole(self, slot: Slot) -> bool:
        """Tell whether a slot is computed from whole tensors: by sums over rows, or a number beside them."""
        return is_factored(self.source.optimizer) or not self.left(slot).entry.local_shape

    def left(self, slot: Slot) -> Item:
        """Return what the update left."""
        return replica(self._view.items[slot])

    @cached_property
    def _without_elements(self) -> UpdateInputs:
        return self.source.without_elements()

    def blocks(self, slots: Sequence[Slot], only: int | None = None) -> Iterator[Block]:
        """Yield everything block by block, or one block alone; numbers are in every block."""
        source = self.source
        left = {slot: self.left(slot) for slot in slots}
        read = [source.param, source.gradient, *source.before.values(), *source.after.values()]
        items = {id(item): item for item in (*read, *left.values())}
        numbers = {i: item.read() for i, item in items.items() if item.entry.local_shape != source.shape}
        whole = [i for i in items if i not in numbers]
        through = partial(item_blocks, only=only) if only is not None else whole_blocks
        found = [through(items[i], most=PASSED_ELEMENTS) for i in whole]
        for arrays in zip(*found, strict=True):
            flat = {i: array.reshape(-1) for i, array in zip(whole, arrays, strict=True)}
            yield Block(source, left, numbers, flat)


@dataclass(frozen=True)
class Block:
    """A block of what one update read and left: ``flat`` by item, beside ``numbers``."""

    source: UpdateSource
    left: Mapping[Slot, Item]
    numbers: Mapping[int, np.ndarray]
    flat: Mapping[int, np.ndarray]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(self.flat[id(self.source.param)].size)

    def piece(self, start: int, *, narrow: bool = False) -> _Piece:
        """Return some elements as float64; ``narrow``: their magnitudes in float32."""
        some = {i: array[start : start + PIECE] for i, array in self.flat.items()}
        wide = {i: as_real(array).reshape(-1) for i, array in some.items()}
        numbers = {i: as_real(number) for i, number in self.numbers.items()}
        return _Piece(*self._held(wide | numbers), *self._held((some if narrow else wide) | numbers))

    def _held(self, arrays: Mapping[int, np.ndarray]) -> tuple[UpdateInputs, dict[Slot, np.ndarray]]:
        inputs = self.source.inputs(lambda item: arrays[id(item)])
        return inputs, {slot: arrays[id(item)] for slot, item in self.left.items()}

    @property
    def is_narrow(self) -> bool:
        """Tell whether all of it is float32."""
        return all(array.dtype == np.float32 for array in self.flat.values())


@dataclass(frozen=True)
class _Piece:
    """Some elements of what one update read and left, and the same as magnitudes are made of it."""

    inputs: UpdateInputs
    left: Mapping[Slot, np.ndarray]
    held: UpdateInputs
    held_left: Mapping[Slot, np.ndarray]

    def residue(self, slot: Slot) -> Sides:
        """Return what the formula leaves of a value, and the magnitude of the terms that it sums."""
        made = expected(slot, self.inputs)
        assert made is not None  # the formula is known
        terms = np.fmax(np.abs(self.held_left[slot]), self._terms(slot, made))
        larger = amplified(slot, self.inputs)
        if larger.ndim or larger != 1:
            terms = terms * larger
        return unexplained(self.left[slot], made), terms

    def _terms(self, slot: Slot, made: np.ndarray) -> np.ndarray:
        """Return the magnitude of the terms that an element of the result sums."""
        if slot.kind == Kind.PARAM:
            param = self.held.param
            return np.asarray(np.abs(param) + np.abs(made.astype(param.dtype, copy=False) - param))
        terms = expected(slot, self._sizes)
        assert terms is not None
        return terms

    @cached_property
    def _sizes(self) -> UpdateInputs:
        return self.held.magnitudes()


def between(slot: Slot, a: _Piece, b: _Piece) -> Sides:
    """Return what remains of b − a, and the size of the terms summed."""
    (error_a, size_a), (error_b, size_b) = a.residue(slot), b.residue(slot)
    return error_b - error_a, np.fmax(size_a, size_b)  # NaN in one run: so large as in the other


class Pieces:
    """The piece of both runs that begins at an element of a block.

    How large terms are needs no more than the six digits of float32, which takes half the time, unless that
    could not square them.
    """

    def __init__(self, x: Block, y: Block, start: int) -> None:
        self._at = x, y, start

    @cached_property
    def _narrow(self) -> tuple[_Piece, _Piece] | None:
        x, y, start = self._at
        both = x.is_narrow and y.is_narrow
        return (x.piece(start, narrow=True), y.piece(start, narrow=True)) if both else None

    @cached_property
    def wide(self) -> tuple[_Piece, _Piece]:
        """The piece of each run, all of it in float64."""
        x, y, start = self._at
        return x.piece(start), y.piece(start)

    def between(self, slot: Slot) -> Sides:
        """Return what remains of b − a, and the size of the terms summed."""
        if self._narrow is not None:
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                error, sizes = between(slot, *self._narrow)
                square = float(sizes @ sizes) / sizes.size
            if sizes.dtype == np.float32 and _SMALL < square < 1 / _SMALL:
                return error.astype(np.float32), sizes
        return between(slot, *self.wide)


def _replay_whole(slot: Slot, a: _Run, b: _Run) -> Unexplained | None:
    """Measure one thing that an update left, from whole tensors; None where no formula is known."""
    left = [one(run.left(slot)) for run in (a, b)]
    if a.source.shape != b.source.shape or left[0].shape != left[1].shape:
        return None
    if not all(predicts(slot, run.source) for run in (a, b)):
        return None
    found = zip(residues(slot, a.source, left[0]), residues(slot, b.source, left[1]), strict=True)
    return measure_unexplained([(y - x, np.fmax(size_x, size_y)) for (x, size_x), (y, size_y) in found])


def _replay(slots: Sequence[Slot], a: _Run, b: _Run) -> dict[Slot, Unexplained]:
    """Compute an update again in both runs, and measure what it left beyond that in each slot."""
    meters = {slot: Meter() for slot in slots}
    if math.prod(a.source.shape) <= PIECE:
        wide = [(x.piece(0), y.piece(0)) for x, y in zip(a.blocks(slots), b.blocks(slots), strict=True)]
        return {slot: measure_unexplained([between(slot, *piece) for piece in wide]) for slot in slots}
    for number, (x, y) in enumerate(zip(a.blocks(slots), b.blocks(slots), strict=True)):
        for start in range(0, x.size, PIECE):
            pieces = Pieces(x, y, start)
            for slot, meter in meters.items():
                meter.add((number, start), pieces.between(slot))

    def again(slot: Slot, number: int) -> Callable[[int], Sides]:
        x, y = (next(run.blocks([slot], number)) for run in (a, b))
        return lambda start: Pieces(x, y, start).between(slot)

    return {slot: meter.result(partial(again, slot)) for slot, meter in meters.items()}


class Meter:
    """Finds the worst element in one pass, though only after it is known what elements are held against.

    Of each piece is kept how bad its worst element is at most, if the least size is no less than what was
    known of it then; the few pieces that may have the worst of all are computed again.
    """

    def __init__(self) -> None:
        self.squares, self.count = 0.0, 0
        self._most: dict[int, list[tuple[float, float, int]]] = {}

    def add(self, place: tuple[int, int], sides: Sides) -> None:
        """Take in the piece that begins at an element of a block."""
        _, sizes = sides
        with np.errstate(over="ignore", invalid="ignore"):
            squares = float(np.dot(sizes, sizes))
        if not math.isfinite(squares):
            squares = float(np.sum(np.where(np.isfinite(sizes), sizes, 0.0) ** 2))
        self.squares, self.count = self.squares + squares, self.count + sizes.size
        least = _NEARLY * least_size(self.squares, self.count)
        number, start = place
        self._most.setdefault(number, []).append((worst_beside(*sides, least), least, start))

    def result(self, again: Callable[[int], Callable[[int], Sides]]) -> Unexplained:
        """Return what was measured; ``again`` gives a block's pieces by where they begin."""
        least = least_size(self.squares, self.count)
        worst = 0.0
        for number, pieces in sorted(self._most.items(), key=lambda e: max(e[1]), reverse=True):
            known: Callable[[int], Sides] | None = None
            for most, at_least, start in sorted(pieces, reverse=True):
                if (most <= worst and at_least <= least) or worst == math.inf:
                    continue
                known = known or again(number)
                worst = max(worst, worst_beside(*known(start), least))
        return Unexplained(worst, self.squares)
