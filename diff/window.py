"""One block in the place of each tensor that is too large to hold, for those who seek a cause."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import numpy as np

from tensortrace.diff.catalog import Item, StepView
from tensortrace.diff.logical import Member, Merged, RankSource, Source, Unlabelled
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import Comparison, OneSided
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import LARGE_ELEMENTS, block_size
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.types import Entry


@dataclass(frozen=True, kw_only=True)
class Window(Merged):
    """One block of a tensor; its entry has the block's shape and the whole's digest."""

    base: Source
    whole: Entry
    number: int

    def stored(self, entry: Entry) -> bool:
        """Tell whether the tensor's bytes are there."""
        return self.base.stored(self.whole)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the block."""
        return next(iter(self.base.blocks(self.whole, block_size(self.whole.local_shape), self.number)))

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the block."""
        if not only:
            yield self.read(entry)


@dataclass(frozen=True)
class Windows:
    """Which block to look at: by boundary name, else by the tensor's shape, else the first."""

    by_name: Mapping[str, int]
    by_shape: Mapping[tuple[int, ...], int]
    pairs: dict[int, tuple[StepPair, StepPair]] = field(default_factory=dict)  # by id: whole, and with blocks

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Windows:
        """Return the blocks that hold the worst elements of some outcomes, the first of which counts most."""
        known = [(o.node.slot.name, o.shape, o.window) for o in reversed(outcomes) if o.window is not None]
        return cls({n: w for n, _, w in known}, {s: w for _, s, w in known})

    def outcome(self, outcome: Outcome) -> Outcome:
        """Return an outcome with blocks in the place of large tensors."""
        pair = None if outcome.pair is None else self._pair(outcome.pair)
        return replace(outcome, pair=pair, comparison=self._comparison(outcome.comparison))

    def _pair(self, pair: StepPair) -> StepPair:
        """Return a pair with blocks in the place of large tensors: one for all outcomes of a step."""
        known = self.pairs.get(id(pair))
        if known is None:
            sides = (pair.a, pair.b, pair.before_a, pair.before_b)
            large = any(_large(item) for view in sides for items in view.items.values() for item in items)
            known = self.pairs[id(pair)] = pair, StepPair(*map(self._view, sides)) if large else pair
        return known[1]

    def _comparison(self, entry: Comparison | OneSided) -> Comparison | OneSided:
        if isinstance(entry, OneSided):
            return replace(entry, items=self._items(entry.items))
        return replace(
            entry,
            items_a=self._items(entry.items_a), items_b=self._items(entry.items_b),
            copies_a=self._items(entry.copies_a), copies_b=self._items(entry.copies_b),
        )  # fmt: skip

    def _view(self, view: StepView) -> StepView:
        return replace(view, items={slot: self._items(items) for slot, items in view.items.items()})

    def _items(self, items: Sequence[Item]) -> tuple[Item, ...]:
        return tuple(self._item(item) if _large(item) else item for item in items)

    def _item(self, item: Item) -> Item:
        entry, source = item.entry, item.source
        first = self.by_shape.get(entry.local_shape, 0)
        number = self.by_name.get(entry.name, first)
        grid = block_grid(entry.local_shape, block_size(entry.local_shape))
        shapes = [shape for _, shape in grid]
        number = number if number < len(shapes) else 0
        members = source.members if isinstance(source, Merged | Unlabelled) else (_member(item),)
        odd = source.odd if isinstance(source, Merged) else ()
        window = Window(members, (), odd, base=source, whole=entry, number=number)
        return item._replace(source=window, entry=msgspec.structs.replace(entry, local_shape=shapes[number]))


def _member(item: Item) -> Member:
    return Member(cast(RankSource, item.source), item.entry)  # a source that is not several is a rank


def _large(item: Item) -> bool:
    return math.prod(item.entry.local_shape) > LARGE_ELEMENTS and not isinstance(item.source, Window)
