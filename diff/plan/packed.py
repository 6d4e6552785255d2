"""Compares what recurrent networks are given packed: time step by time step, over rows sorted by length.

A PackedSequence's order is that of one call's own rows. So its data meet as padded rows in the order of the
batch, and of what says how it is packed the rows' lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace as with_fields

from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.rearranged import Rearranged
from tensortrace.tracer.types import Entry, Kind

_DATA, _SIZES, _ORDERS = "data", "batch_sizes", ("sorted_indices", "unsorted_indices")

Items = tuple[Item, ...]


@dataclass(frozen=True)
class Unpacked(Rearranged):
    """Stands in the place of who holds a packed tensor, and gives its rows [rows, longest, …], padded with 0.

    ``sizes`` are the rows that each position has, ``place`` where each row lies among those sorted by length.
    """

    sizes: np.ndarray
    place: np.ndarray
    longest: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it gives."""
        return (len(self.place), self.longest, *self.entry.local_shape[1:])

    def read(self, entry: Entry) -> np.ndarray:
        """Return the tensor with its rows first."""
        values = self.source.read(self.entry)
        rows = np.zeros(self.shape, dtype=values.dtype)
        begin = 0
        for position, size in enumerate(self.sizes):
            rows[:size, position] = values[begin : begin + size]
            begin += size
        in_order: np.ndarray = rows[self.place]
        return in_order


@dataclass(frozen=True)
class Lengths(Unpacked):
    """Gives the length of each row [rows], in the place of the rows that each position has."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it gives."""
        return (len(self.place),)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the length of each row."""
        ends: np.ndarray = (self.sizes[None] > self.place[:, None]).sum(axis=1)
        return ends


def is_order_of_packed(slot: Slot, pair: StepPair) -> bool:
    """Tell whether a boundary holds nothing but the order in which a call's own rows are packed."""
    return _field(slot) in _ORDERS and all(_is_packed(slot, view) for view in (pair.a, pair.b))


def unpacked(slot: Slot, a: Items, b: Items, pair: StepPair) -> tuple[Items, Items] | None:
    """Return a packed boundary of both runs with its rows as the batch has them; None of others.

    Raises NotComparable where what says how it is packed was not recorded or does not fit.
    """
    if _field(slot) not in (_DATA, _SIZES) or not all(_is_packed(slot, view) for view in (pair.a, pair.b)):
        return None
    known_a, known_b = ([_sizes_of(slot, i, view) for i in side] for view, side in ((pair.a, a), (pair.b, b)))
    longest = max((len(sizes) for sizes, _ in (*known_a, *known_b)), default=0)

    def side(items: Items, known: list[tuple[np.ndarray, np.ndarray]]) -> Items:
        kind = Unpacked if _field(slot) == _DATA else Lengths
        made = (kind(i.source, i.entry, *found, longest) for i, found in zip(items, known, strict=True))
        return tuple(_with(item, source) for item, source in zip(items, made, strict=True))

    return side(a, known_a), side(b, known_b)


def _with(item: Item, source: Unpacked) -> Item:
    return item._replace(source=source, entry=with_fields(item.entry, local_shape=source.shape))


def _sizes_of(slot: Slot, item: Item, view: StepView) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that each position has, and where each row lies among those sorted by length."""
    sizes = _read(_beside(slot, _SIZES), item, view)
    if sizes is None:
        raise NotComparable("how the rows are packed was not recorded")
    place = _read(_beside(slot, _ORDERS[1]), item, view)
    place = np.arange(sizes.max(initial=0)) if place is None else place
    held = item.entry.local_shape[0] if _field(slot) == _DATA else int(sizes.sum())
    falls = bool((np.diff(sizes) <= 0).all() and (sizes > 0).all())
    if (
        not falls
        or held != sizes.sum()
        or not np.array_equal(np.sort(place), np.arange(sizes.max(initial=0)))
    ):
        raise NotComparable("what says how the rows are packed does not fit the tensor")
    return sizes, place


def _read(slot: Slot, item: Item, view: StepView) -> np.ndarray | None:
    """Return what the same pass recorded at another boundary, None where it did not."""
    found = next((other for other in view.items.get(slot, ()) if other.part == item.part), None)
    if found is None or not found.source.stored(found.entry) or len(found.entry.local_shape) != 1:
        return None
    return found.read()


def _is_packed(slot: Slot, view: StepView) -> bool:
    """Tell whether a boundary is a field of a PackedSequence."""
    return all(_beside(slot, field) in view.items for field in (_DATA, _SIZES))


def _beside(slot: Slot, field: str) -> Slot:
    """Return another field of the same PackedSequence; what says how it is packed has no gradients."""
    return slot._replace(kind=Kind.ACTIVATION, slot=f"{slot.slot.rpartition('.')[0]}.{field}")


def _field(slot: Slot) -> str:
    return slot.slot.rpartition(".")[2] if slot.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) else ""
