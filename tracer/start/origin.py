"""The initial state of another run, put together from its trace one global tensor at a time."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from tensortrace.tracer import layout as files
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.start.sources import Source, assembled, named, shape_of
from tensortrace.tracer.types import INIT_STEP, Entry, Kind


class Origin:
    """The tensors of ``init`` in a trace, by kind, canonical name and slot; aliases find them too.

    A layout file that was recorded with the trace gives tensors their names and places.
    """

    def __init__(self, path: Path) -> None:
        """Read the indexes of all ranks; raises TraceError where there is no such state."""
        self._sources: dict[tuple[Kind, str, str], list[Source]] = defaultdict(list)
        self._aliases: dict[str, str] = {}
        stored = path / files.LAYOUT
        self._layout = RunLayout.load(stored) if stored.is_file() else None
        for rank in Trace.open(path).ranks:
            for entry in rank.entries:
                if entry.step == INIT_STEP and entry.call == 0:
                    for name, source in named(rank, entry, self._layout):
                        self._sources[entry.kind, name, entry.slot].append(source)
                        self._aliases.update(dict.fromkeys(entry.meta.aliases, name))
        if not self.names(Kind.PARAM):
            raise BadRequest(f"{path} holds no initial parameters", remedy="record it without --kinds")

    def names(self, kind: Kind) -> set[str]:
        """Return the canonical names that there are of a kind."""
        return {name for known, name, _ in self._sources if known is kind}

    def find(self, kind: Kind, names: tuple[str, ...]) -> str | None:
        """Return the name under which one of these names is known, or None."""
        have = self.names(kind)
        return next((n for name in names for n in (name, self._aliases.get(name)) if n in have), None)

    def slots(self, kind: Kind, name: str) -> list[str]:
        """Return the slots of a name in the order in which they were recorded."""
        return [slot for known, other, slot in self._sources if (known, other) == (kind, name)]

    def entry(self, kind: Kind, name: str, slot: str) -> Entry:
        """Return what the first rank says of a tensor."""
        return self._sources[kind, name, slot][0].entry

    def shape(self, kind: Kind, name: str, slot: str) -> tuple[int, ...]:
        """Return the shape of the global tensor."""
        return shape_of(self._sources[kind, name, slot])

    def whole(self, kind: Kind, name: str, slot: str) -> torch.Tensor:
        """Return the global tensor; raises TraceError naming it where its parts don't make one."""
        return assembled(name, self._sources[kind, name, slot], self._layout)
