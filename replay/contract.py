"""What a boundary should hold, given what it was computed from; and what of a step has no such contract."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import Sides
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.logical import NO_LAYOUT
from tensortrace.diff.plan.comparison import Comparison, OneSided, by_rank
from tensortrace.diff.plan.evaluations import further_evaluations
from tensortrace.diff.plan.updates import as_real, unexplained
from tensortrace.diff.stream import Sum, block_size, item_blocks, paired
from tensortrace.diff.stream import one as as_sum
from tensortrace.diff.tolerance import Unexplained, measure_streamed, measure_unexplained
from tensortrace.tracer.types import Kind

UNPLACED = (
    f"ranks hold different tensors of it from the start, and {NO_LAYOUT}: give one with --layout, or "
    "they are copies that began apart"
)

EVALUATED = "the window evaluates a batch again, by parameters that are not recorded or with gradients anew"

Ref = tuple[int | None, Slot]
Own = Callable[[], Iterable[Sides]]
"""Gives blocks of what is there beyond what is expected, and of the terms' magnitudes."""


@dataclass(frozen=True)
class Contract:
    """One boundary with what it should hold.

    ``actual`` are all ranks' copies, which have to be equal. Without ``own`` values are compared exactly.
    ``reads`` are the boundaries that the expected value was computed from. ``parts`` are the contracts of
    ranks that hold tensors of their own.
    """

    slot: Slot
    microbatch: int | None
    actual: tuple[Item, ...]
    expected: Item
    reads: tuple[Ref, ...] = ()
    own: Own | None = None
    text: str = ""
    parts: tuple[Contract, ...] = ()

    @classmethod
    def of_ranks(cls, parts: Sequence[Contract]) -> Contract:
        """Return the contracts of several ranks' own tensors of one boundary as one.

        Where all hold the same they are copies. Of numbers the one that is farthest off stands for all.
        """
        first = parts[0]
        items = tuple(item for part in parts for item in part.actual)
        if len(parts) == 1 or len({item.entry.digest for item in items}) == 1:
            return replace(first, actual=items)
        if all(part.actual[0].entry.local_shape == () for part in parts):
            return max(parts, key=Contract._distance)
        return replace(first, parts=tuple(parts))

    def _distance(self) -> float:
        """Return how far a number is from what it should be."""
        made, there = (np.asarray(item.read(), np.complex128) for item in (self.expected, self.actual[0]))
        apart = float(np.abs(there - made) / max(float(np.abs(made)), 1e-300))
        return math.inf if math.isnan(apart) else apart

    def comparison(self) -> Comparison:
        """Return the contract as the diff compares two sides: what is expected is ``a``."""
        if self.parts:
            return self._of_parts()
        first, own = by_rank(self.actual)[0], self.own
        return Comparison(
            self.slot, self.microbatch, lambda: paired(as_sum(self.expected), as_sum(first)),
            (self.expected,), (first,), self.reads, exact=own is None,
            own=None if own is None else (lambda: _measured(own, first)),
            copies_b=self.actual, text=self.text,
        )  # fmt: skip

    def _of_parts(self) -> Comparison:
        """Return all ranks' own tensors end to end."""

        def load() -> Assembled:
            sides = ([p.expected for p in self.parts], [p.actual[0] for p in self.parts])
            a, b = (np.concatenate([np.ravel(item.read()) for item in side]) for side in sides)
            return Assembled(a, b)

        def own() -> Iterator[Sides]:
            for part in self.parts:
                assert part.own is not None  # all or none are exact
                yield from part.own()

        exact = self.own is None
        return Comparison(
            self.slot, self.microbatch, load, tuple(p.expected for p in self.parts),
            tuple(i for p in self.parts for i in p.actual), self.reads, exact=exact,
            own=None if exact else (lambda: measure_streamed(own)), text=self.text,
        )  # fmt: skip


def _measured(own: Own, actual: Item) -> Unexplained:
    """Measure what no contract explains, computed once unless it is too large to hold."""
    shape = actual.entry.local_shape
    return measure_streamed(own) if math.prod(shape) > block_size(shape) else measure_unexplained(own())


class Gap(NamedTuple):
    """A recorded boundary that was not replayed, and why."""

    slot: Slot
    microbatch: int | None
    reason: str


@dataclass
class Contracts:
    """Everything that one step's contracts say."""

    found: list[Contract] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    odd: list[OneSided] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def gap(self, slot: Slot, items: Iterable[Item], reason: str) -> None:
        """Note that recorded boundaries are not replayed."""
        for microbatch in dict.fromkeys(map(microbatch_of, items)):
            self.gaps.append(Gap(slot, microbatch, reason))

    def without(self, names: frozenset[str], reason: str) -> None:
        """Let go of what is said of some parameters: it is not replayed."""
        for contract in self.found:
            if contract.slot.name in names:
                self.gaps.append(Gap(contract.slot, contract.microbatch, reason))
        self.found = [contract for contract in self.found if contract.slot.name not in names]

    def together(self) -> list[Contract]:
        """Return one contract for each boundary."""
        found: dict[Ref, list[Contract]] = {}
        for contract in self.found:
            found.setdefault((contract.microbatch, contract.slot), []).append(contract)
        return [Contract.of_ranks(parts) for parts in found.values()]

    @property
    def told(self) -> set[Ref]:
        """The boundaries of which something is said."""
        told = {(c.microbatch, c.slot) for c in self.found} | {(g.microbatch, g.slot) for g in self.gaps}
        return told | {(o.microbatch, o.slot) for o in self.odd}


@dataclass(frozen=True)
class Step:
    """One step of a run and the state before it, as the contracts read them.

    ``first`` says that nothing tells what the program did before it: it is the first that was recorded. Of
    ``unplaced`` parameters ranks hold different tensors from the start, and nothing tells parts from copies.
    """

    view: StepView
    before: StepView
    first: bool
    unplaced: frozenset[str] = frozenset()

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient rungs."""
        return Gradients(self.view)

    @cached_property
    def overwritten(self) -> bool:
        """Whether the program writes new gradients over what is left in ``.grad``."""
        factors = self.gradients.factors
        left = {} if factors is None else {r: f for r, f in factors.by_rank.items() if r < 0}
        return factors is not None and any(left) and all(
            abs(f) < 1e-3 * abs(factors.by_rank.get(-1 - r, 0.0)) for r, f in left.items()
        )  # fmt: skip

    @cached_property
    def evaluations(self) -> frozenset[int]:
        """The microbatches that evaluate a batch again, at other parameters: they are no parts of a batch.

        An optimizer evaluates the model in its step (LBFGS), or the program drops a pass's gradients and goes
        through the same inputs once more (sharpness-aware updates).
        """
        return further_evaluations(self.view) | self._again

    @property
    def _again(self) -> frozenset[int]:
        """The passes that are kept of a window whose earlier ones, of the same inputs, were dropped."""
        kept = self.gradients.kept_from
        if not kept:
            return frozenset()
        given: dict[bool, set[tuple[int, str]]] = {False: set(), True: set()}
        for _, items in self.view.find(Kind.INPUT, phase="train"):
            for item in items:
                if item.part is not None:
                    given[item.part.number >= kept].add((item.part.rank, item.entry.digest))
        same = bool(given[True]) and given[True] <= given[False]
        return frozenset(range(kept, self.view.last_microbatch() + 1)) if same else frozenset()

    def left_over(self, name: str) -> tuple[Item, ...]:
        """Return what each rank's ``.grad`` held when the window began, and new gradients are added to."""
        return () if self.overwritten else self.gradients.start_items(name)

    @cached_property
    def loss_scale(self) -> float | None:
        """The loss scale that was in force; None without one."""
        found = [items[0] for slot, items in self.view.find(Kind.SCHEDULE) if slot.slot == "scale"]
        return float(found[0].read()) if found else None

    def with_expected(self, contracts: Iterable[Contract], base: StepView | None = None) -> StepView:
        """Return the step as it would be if all contracts were kept; ``base`` is it with others kept."""
        items = dict((base or self.view).items)
        for contract in (part for whole in contracts for part in whole.parts or (whole,)):
            kept = {id(item) for item in contract.actual}
            items[contract.slot] = tuple(
                contract.expected if id(item) in kept else item for item in items.get(contract.slot, ())
            )
        return replace(self.view, items=items, recomputed=())


def microbatch_of(item: Item) -> int | None:
    """Return the microbatch of a recorded tensor, None of the window's."""
    return item.part.number if item.part else item.entry.microbatch


def by_microbatch(items: Iterable[Item]) -> Mapping[int | None, tuple[Item, ...]]:
    """Return all ranks' items of each microbatch."""
    found: dict[int | None, tuple[Item, ...]] = {}
    for item in items:
        number = microbatch_of(item)
        found[number] = (*found.get(number, ()), item)
    return found


def readable(*items: Item) -> bool:
    """Tell whether all values were stored."""
    return all(item.source.stored(item.entry) for item in items)


def beyond_sum(expected: Sum, actual: Item) -> Own:
    """Return how what is there is judged by a sum of recorded tensors: beside its terms' magnitudes."""

    def own() -> Iterator[Sides]:
        terms = [item_blocks(term.item) for term in expected.terms]
        for *parts, value in zip(*terms, item_blocks(actual), strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                scaled = [
                    as_real(part) * term.times / term.over
                    for term, part in zip(expected.terms, parts, strict=True)
                ]
                there = as_real(value)
                total = np.asarray(sum(scaled[1:], scaled[0]))
                size = np.asarray(sum((np.abs(part) for part in scaled[1:]), np.abs(scaled[0])))
            yield unexplained(there, total), np.fmax(size, np.abs(there))

    return own


def beyond_number(expected: float, actual: Item, units: float = 1.0) -> Own:
    """Return how a number is judged; ``units`` times what its own format would allow."""

    def own() -> Iterator[Sides]:
        value = as_real(actual.read())
        made = np.full_like(value, expected)
        yield unexplained(value, made), np.fmax(np.abs(value), np.abs(made)) * units

    return own
