"""Which recorded value of a parameter or buffer a call computed with, where that is certain.

A value is certain where no write can have come between its record and the call. Optimizers are seen as they
write; averages, target networks and writes by hand are seen only when something compares them: when a
window opens, and copies of a model when one closes. In between the values on both sides have to be the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from tensortrace.diff.catalog import Catalog, StepView
from tensortrace.replay.modules.given import NoFormula
from tensortrace.tracer.types import Kind

UNKNOWN = "the parameters that it computed with were not recorded"
UNCERTAIN = "what its parameters or buffers were at its call is not certain: they may have been written"

_COPY = "copy"
"""What the records of a copy of a model say of themselves."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a call in training writes and does not read."""


class Record(NamedTuple):
    """One recorded value."""

    event: int
    step: int
    kind: Kind
    slot: str
    digest: str
    copy: bool


class At(NamedTuple):
    """A call of a rank: its module, its first event, whether it is in a training microbatch."""

    rank: int
    module: str
    event: int
    trains: bool


class Versions:
    """All values that each rank recorded of its parameters and buffers, in order of events."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._records: dict[tuple[int, str], list[Record]] = defaultdict(list)
        self._held: set[str] = set()
        self._writes: dict[tuple[int, str], set[int]] = defaultdict(set)
        opened: dict[int, dict[int, int]] = defaultdict(dict)
        for step in (*([-1] if catalog.has_init else []), *catalog.steps):
            for source, entry in catalog.recorded(step):
                rank, event = source.rank, entry.event
                if entry.kind == Kind.SCHEDULE:
                    self._held |= set(entry.meta.members)
                elif entry.kind == Kind.OPTIMIZER_STATE:
                    self._held.add(entry.name)
                elif entry.kind in (Kind.PARAM, Kind.BUFFER) and entry.slot in ("model", "start"):
                    copy = entry.kind == Kind.BUFFER and entry.meta.text == _COPY
                    made = Record(event, entry.step, entry.kind, entry.slot, entry.digest, copy)
                    self._records[rank, entry.name].append(made)
                elif entry.kind == Kind.ACTIVATION:
                    if entry.meta.training:
                        self._writes[rank, entry.name].add(event)
                    if entry.microbatch is not None:
                        opened[rank][entry.step] = min(event, opened[rank].get(entry.step, event))
        for records in self._records.values():
            records.sort(key=lambda record: record.event)
        self._opened = {rank: sorted(steps.values()) for rank, steps in opened.items()}

    def known(self, rank: int, name: str) -> bool:
        """Tell whether a rank recorded any value of a parameter or buffer."""
        return (rank, name) in self._records

    def at(self, name: str, call: At) -> Record:
        """Return the record of the value that a call computed with; raise NoFormula if it is not certain."""
        records = self._records[call.rank, name]
        place = bisect_left(records, call.event, key=lambda record: record.event)
        if not place:
            raise NoFormula(UNKNOWN)
        before, after = records[place - 1], records[place] if place < len(records) else None
        if after is not None and after.digest == before.digest:
            return before
        plain = before.kind == Kind.BUFFER and not before.copy
        certain = self._buffer if plain else self._parameter
        if not certain(name, call, records, before, after):
            raise NoFormula(UNCERTAIN)
        return before

    def views(self, record: Record, now: int) -> tuple[StepView, ...]:
        """Return the step that a value was recorded in, if all steps from it to another one were recorded."""
        known = set(self._catalog.steps)
        whole = all(step in known for step in range(max(record.step, 0), now + 1))
        return (self._catalog.view(record.step),) if whole else ()

    def _parameter(
        self, name: str, call: At, records: list[Record], before: Record, after: Record | None
    ) -> bool:
        """Tell whether a parameter, or what a copy of a model holds, was not written before a call."""
        held = name in self._held
        until = after.event if after is not None else None
        if after is None or after.slot != "start":
            # a window that opened later would have recorded another value
            if not before.copy and self._opens(call.rank, call.event, until):
                return True
        if after is not None:  # an optimizer's update is recorded where it is made; a hand's with the window
            return after.slot == "model" and not after.copy and (held or call.trains)
        if held and call.trains:
            return True  # it was looked at when the window opened
        return (held or call.trains) and not _written(records)

    def _buffer(
        self, name: str, call: At, records: list[Record], before: Record, after: Record | None
    ) -> bool:
        """Tell the same of a buffer, which calls in training may write."""
        own = name.rpartition(".")[2]
        writes = self._writes.get((call.rank, call.module), set())
        training = call.event in writes
        if training and own in STATISTICS:
            return True  # it writes them
        if any(before.event < event < call.event for event in writes) and own in STATISTICS:
            return False
        return after is None or any(call.event < event < after.event for event in writes)

    def _opens(self, rank: int, event: int, until: int | None) -> bool:
        """Tell whether a window opened after an event, before another one."""
        found = self._opened.get(rank, [])
        place = bisect_left(found, event + 1)
        return place < len(found) and (until is None or found[place] < until)


def _written(records: list[Record]) -> bool:
    """Tell whether something else than an update that was seen has ever written a parameter."""
    return any(
        now.digest != last.digest and (now.slot == "start" or now.copy) for last, now in pairwise(records)
    )
