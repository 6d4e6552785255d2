"""Losses given token by token, and masked afterwards: valid are the terms that weigh anything.

A program may mask what ``reduction="none"`` returned, by a product or by choosing, instead of telling the
function which labels to ignore. What it leaves out takes no part in the objective: sum, count and labels are
those of the rest, as they are where the function is told, or given no more than the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import NamedTuple, cast

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.logical import Member, RankSource, Together
from tensortrace.tracer.types import Entry, Kind

_Items = Mapping[Slot, tuple[Item, ...]]


@dataclass(frozen=True)
class Weighed(Together):
    """What is left of a loss's tensor without the terms that weigh nothing."""

    values: np.ndarray

    def stored(self, entry: Entry) -> bool:
        """Return true: it is held."""
        return True

    def read(self, entry: Entry) -> np.ndarray:
        """Return what is left."""
        return self.values

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield it in one: a scalar, or a label of each token."""
        if not only:
            yield self.values


class _Call(NamedTuple):
    """A call's items of one part by slot, where the loss of each term and its weight are known."""

    items: dict[str, tuple[Slot, Item]]
    value: np.ndarray
    weight: np.ndarray
    target: np.ndarray | None
    ignore_index: int | None

    @property
    def counted(self) -> np.ndarray:
        """Which terms the function itself does not ignore."""
        if self.target is None or self.ignore_index is None:
            return np.ones(self.value.shape, dtype=bool)
        return np.asarray(self.target != self.ignore_index)


def only_weighing(a: StepView, b: StepView) -> tuple[StepView, StepView]:
    """Return a step of both runs with the items of losses cut to the terms that weigh anything.

    A loss that both runs ask for as many terms is left as it is: what they weigh is compared token by token.
    """
    counts = _counts(a), _counts(b)
    names = {name for name in {*counts[0], *counts[1]} if counts[0].get(name) != counts[1].get(name)}
    return _cut(a, names), _cut(b, names)


def _counts(view: StepView) -> dict[str, int]:
    """Return the number of terms of each loss of a step, in all parts and calls."""
    found: dict[str, int] = defaultdict(int)
    for slot, held in view.find(Kind.LOSS, phase="train"):
        if slot.slot == "count":
            found[slot.name] += sum(int(item.read()) for item in held if item.source.stored(item.entry))
    return found


def _cut(view: StepView, names: Container[str]) -> StepView:
    """Return a step with some of its losses cut.

    A loss of which nothing weighs anything in the whole step is left as it is: that is a coefficient of 0.
    """
    items = view.items
    calls = [(name, call) for name, call in _calls(items) if name in names]
    weighing = {name for name, call in calls if (call.weight != 0).any()}
    new: dict[tuple[Slot, object], Item] = {}
    for name, call in calls:
        left_out = call.counted & (call.weight == 0)
        if name in weighing and left_out.any():
            for slot, values in _without(call, left_out).items():
                key, item = call.items[slot]
                new[key, item.part] = _holding(item, values)
    if not new:
        return view
    cut = {slot: tuple(new.get((slot, item.part), item) for item in held) for slot, held in items.items()}
    return changed(view, items=cut)


def _without(call: _Call, left_out: np.ndarray) -> dict[str, np.ndarray]:
    kept = call.counted & ~left_out
    found = {
        "sum": np.asarray(call.value[kept].astype(np.float64).sum()),
        "count": np.asarray(kept.sum(), dtype=np.int64),
    }
    if call.target is not None and call.ignore_index is not None:
        found["target"] = np.where(left_out, call.ignore_index, call.target).astype(call.target.dtype)
    return {slot: values for slot, values in found.items() if slot in call.items}


def _calls(items: _Items) -> Iterator[tuple[str, _Call]]:
    """Yield the name of each loss of a training pass whose terms have weights of their own, with its call."""
    found: dict[tuple[str, int, object], dict[str, list[tuple[Slot, Item]]]] = {}
    for slot, held in items.items():
        if slot.kind == Kind.LOSS and slot.phase == "train" and slot.name != "backward":
            for item in held:
                if item.entry.meta.reduction == "none":
                    by_slot = found.setdefault((slot.name, slot.call, item.part), defaultdict(list))
                    by_slot[slot.slot].append((slot, item))
    for (name, _, _), by_slot in found.items():
        call = _call({slot: held[0] for slot, held in by_slot.items() if len(held) == 1})
        if call is not None:
            yield name, call


def _call(by_slot: dict[str, tuple[Slot, Item]]) -> _Call | None:
    """Return what is known of a call; None where it is not every term's loss and weight."""
    if not {"value", "weight"} <= by_slot.keys():
        return None
    shape = by_slot["value"][1].entry.local_shape
    wanted = [by_slot[slot][1] for slot in ("value", "weight", "target") if slot in by_slot]
    if not shape or any(i.entry.local_shape != shape or not i.source.stored(i.entry) for i in wanted):
        return None
    value, weight, *target = (item.read() for item in wanted)
    ignored = by_slot["value"][1].entry.meta.ignore_index
    return _Call(by_slot, value, weight, target[0] if target else None, ignored)


def _holding(item: Item, values: np.ndarray) -> Item:
    source = item.source
    members = (
        source.members if isinstance(source, Together) else (Member(cast(RankSource, source), item.entry),)
    )
    digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(values).tobytes())
    entry = replace(item.entry, digest=digest, local_shape=tuple(values.shape))
    return item._replace(source=Weighed(members, values), entry=entry)
