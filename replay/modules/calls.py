"""The calls of modules in a step: what each was given, returned and was passed back, and its parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.masters import COPY
from tensortrace.replay.contract import UNPLACED, Step
from tensortrace.replay.modules.given import NoFormula
from tensortrace.replay.modules.versions import UNKNOWN, At, Versions
from tensortrace.tracer.types import ROOT, Kind


@dataclass
class Call:
    """One call in one part of the batch; items by their slots (``in.0``, ``out``)."""

    name: str
    number: int
    part: Part
    values: dict[str, tuple[Slot, Item]] = field(default_factory=dict)
    gradients: dict[str, tuple[Slot, Item]] = field(default_factory=dict)

    @cached_property
    def event(self) -> int:
        """The number of its first event, of its lowest rank."""
        return min(item.entry.event for _, item in self.values.values())

    def given(self) -> Iterator[tuple[str, Item]]:
        """Yield its inputs by their slots without ``in.``."""
        for name, (_, item) in self.values.items():
            if name.startswith("in."):
                yield name.removeprefix("in."), item

    @property
    def returned(self) -> list[str]:
        """The slots of its results."""
        return [name for name in self.values if name.startswith("out")]


def calls_of(view: StepView) -> list[Call]:
    """Return all calls of a step, in order of events within each part, parts in their order."""
    found: dict[tuple[str, int, Part], Call] = {}
    for kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD):
        for slot, items in view.find(kind):
            for item in items:
                if item.part is None:
                    continue
                key = slot.name, slot.call, item.part
                call = found.get(key)
                if call is None:
                    if kind == Kind.ACTIVATION_GRAD:  # of a further backward through the same call
                        continue
                    call = found[key] = Call(*key)
                (call.values if kind == Kind.ACTIVATION else call.gradients)[slot.slot] = slot, item
    return sorted(found.values(), key=lambda c: (c.part.phase != "train", c.part.number, c.event))


class Owned:
    """The parameters and buffers of modules, as they were when a call read them."""

    def __init__(self, step: Step, versions: Versions) -> None:
        self._step, self._versions = step, versions
        self._by_module: dict[str, dict[str, tuple[Kind, str]]] = defaultdict(dict)
        for view in (step.before, step.view):
            for kind in (Kind.PARAM, Kind.BUFFER):
                for slot, items in view.find(kind):
                    for name in (slot.name, *(alias for item in items for alias in item.entry.meta.aliases)):
                        self._add(kind, slot.name, name)

    def _add(self, kind: Kind, canonical: str, name: str) -> None:
        module, _, own = name.rpartition(".")
        self._by_module[module or ROOT][own] = kind, canonical

    def names(self, module: str) -> dict[str, str]:
        """Return the canonical names of a module's own parameters, by their own names."""
        held = self._by_module.get(module, {})
        return {own: name for own, (kind, name) in held.items() if kind == Kind.PARAM}

    def items(self, call: Call, needs: tuple[str, ...] = ()) -> dict[str, Item]:
        """Return the values that a call's module had when it was called, by their own names.

        ``needs`` are those of modules inside it that it reads without calling them. Raises NoFormula.
        """
        held = dict(self._by_module.get(call.name, {}))
        for need in needs:
            inner, _, own = need.rpartition(".")
            prefix = inner if call.name == ROOT else f"{call.name}.{inner}"
            if own in self._by_module.get(prefix, {}):
                held[need] = self._by_module[prefix][own]
        return {own: self._value(kind, name, call) for own, (kind, name) in held.items()}

    def _value(self, kind: Kind, name: str, call: Call) -> Item:
        if name in self._step.unplaced:
            raise NoFormula(UNPLACED)
        rank = next(iter(call.values.values()))[1].source.rank
        event = min(e.event for _, item in call.values.values() for r, e in item.members if r == rank)
        copied = self._step.view.items.get(Slot("window", kind, name, COPY, 0))
        if copied:
            return self._one(copied, rank)
        if not self._versions.known(rank, name):
            raise NoFormula(UNKNOWN)
        record = self._versions.at(name, At(rank, call.name, event, call.part.phase == "train"))
        for view in (self._step.before, self._step.view, *self._versions.views(record, self._step.view.step)):
            for slot in (*view.named(Kind.PARAM, name), *view.named(Kind.BUFFER, name)):
                for item in view.items[slot] if slot.slot in ("model", "start") else ():
                    if any(r == rank and e.digest == record.digest for r, e in item.members):
                        return self._one(view.items[slot], rank)
        raise NoFormula(UNKNOWN)

    @staticmethod
    def _one(items: tuple[Item, ...], rank: int) -> Item:
        if len({item.entry.digest for item in items}) == 1:
            return items[0]
        own = [item for item in items if rank in item.ranks]
        if len(own) != 1 or any(item.entry.shard is None for item in items):
            raise NoFormula(UNPLACED)
        return own[0]
