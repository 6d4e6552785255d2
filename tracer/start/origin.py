"""The initial state of another run, put together from its trace one global tensor at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from tensortrace.tracer import layout as files
from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.geometry import Held, held
from tensortrace.tracer.geometry_cover import check, one_copy
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.rules import RunLayout, View
from tensortrace.tracer.start.places import indices
from tensortrace.tracer.types import INIT_STEP, Entry, Kind, Shard


class Source(NamedTuple):
    """One rank's part of a tensor; ``view`` takes it from what was recorded, where a layout file says how."""

    rank: RankTrace
    entry: Entry
    view: View | None = None

    @property
    def shard(self) -> Shard | None:
        """Where the part lies."""
        return self.entry.shard if self.view is None else self.view.shard

    def read(self) -> torch.Tensor:
        """Return the part."""
        recorded = self.rank.read(self.entry)
        return torch.from_numpy((recorded if self.view is None else self.view.take(recorded)).copy())


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
                    for name, source in self._named(rank, entry):
                        self._sources[entry.kind, name, entry.slot].append(source)
                        self._aliases.update(dict.fromkeys(entry.meta.aliases, name))
        if not self.names(Kind.PARAM):
            raise BadRequest(f"{path} holds no initial parameters", remedy="record it without --kinds")

    def _named(self, rank: RankTrace, entry: Entry) -> list[tuple[str, Source]]:
        layout = self._layout
        if layout is None:
            return [(entry.name, Source(rank, entry))]
        if entry.shard is None:
            views = layout.views(entry.kind, entry.slot, entry.name, rank.rank, entry.local_shape)
            if views:
                return [(view.name, Source(rank, entry, view)) for view in views]
        return [(layout.canonical(entry.name, rank.rank) or entry.name, Source(rank, entry))]

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
        first = self._sources[kind, name, slot][0]
        return (first.shard.global_shape if first.shard else None) or first.entry.local_shape

    def whole(self, kind: Kind, name: str, slot: str) -> torch.Tensor:
        """Return the global tensor; raises TraceError naming it where its parts don't make one."""
        sources = self._sources[kind, name, slot]
        if all(source.shard is None for source in sources):
            if len({source.entry.digest for source in sources}) > 1:
                raise TraceError(f"{name}: its parts on {len(sources)} ranks have no known layout")
            return sources[0].read()
        return self._assembled(name, sources)

    def _assembled(self, name: str, sources: list[Source]) -> torch.Tensor:
        by_rank = {source.rank.rank: source for source in sources if source.shard is not None}
        parts = [self._held(name, source) for source in by_rank.values()]
        for problem in (p for p in check(parts) if p.kind != "copies"):
            raise TraceError(f"{name}: {problem}")
        if any(part.partial_shape for part in parts):
            raise TraceError(f"{name} is a sum over ranks")
        first = next(iter(by_rank.values())).read()
        flat = torch.empty(math.prod(parts[0].region.global_shape), dtype=first.dtype)
        for part in one_copy(parts):
            local = by_rank[part.rank].read()
            for dim, size in enumerate(part.region.shape):
                local = local.narrow(dim, 0, size)
            if part.region.size:
                flat[torch.cat(list(indices(part.region)))] = local.flatten()
        return flat.reshape(parts[0].region.global_shape)

    def _held(self, name: str, source: Source) -> Held:
        number, entry = source.rank.rank, source.entry
        if source.view is not None and self._layout is not None:
            return held(number, source.view.shard, self._layout.mesh, source.view.local_shape)
        if entry.shard is None or source.rank.manifest is None:
            raise TraceError(f"{name}: rank {number} has no {source.rank.folder.name}/rank.json")
        mesh = source.rank.manifest.meshes[entry.shard.mesh]
        return held(number, entry.shard, mesh, entry.local_shape)
