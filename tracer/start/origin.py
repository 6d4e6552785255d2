"""The initial state of another run, put together from its trace one global tensor at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.geometry import held
from tensortrace.tracer.geometry_cover import check, one_copy
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.start.places import indices
from tensortrace.tracer.types import INIT_STEP, Entry, Kind


class Source(NamedTuple):
    """One rank's part of a tensor."""

    rank: RankTrace
    entry: Entry


class Origin:
    """The tensors of ``init`` in a trace, by kind, canonical name and slot; aliases find them too."""

    def __init__(self, path: Path) -> None:
        """Read the indexes of all ranks; raises TraceError where there is no such state."""
        self._sources: dict[tuple[Kind, str, str], list[Source]] = defaultdict(list)
        self._aliases: dict[str, str] = {}
        for rank in Trace.open(path).ranks:
            for entry in rank.entries:
                if entry.step == INIT_STEP and entry.call == 0:
                    self._sources[entry.kind, entry.name, entry.slot].append(Source(rank, entry))
                    self._aliases.update(dict.fromkeys(entry.meta.aliases, entry.name))
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

    def whole(self, kind: Kind, name: str, slot: str) -> torch.Tensor:
        """Return the global tensor; raises TraceError naming it where its parts don't make one."""
        sources = self._sources[kind, name, slot]
        if all(source.entry.shard is None for source in sources):
            if len({source.entry.digest for source in sources}) > 1:
                raise TraceError(f"{name}: its parts on {len(sources)} ranks have no known layout")
            return _read(sources[0])
        return _assembled(name, sources)


def _read(source: Source) -> torch.Tensor:
    return torch.from_numpy(source.rank.read(source.entry).copy())


def _assembled(name: str, sources: list[Source]) -> torch.Tensor:
    by_rank = {source.rank.rank: source for source in sources if source.entry.shard is not None}
    parts = []
    for number, (rank, entry) in by_rank.items():
        if entry.shard is None or rank.manifest is None:
            raise TraceError(f"{name}: rank {number} has no {rank.folder.name}/rank.json")
        parts.append(held(number, entry.shard, rank.manifest.meshes[entry.shard.mesh], entry.local_shape))
    for problem in (p for p in check(parts) if p.kind != "copies"):
        raise TraceError(f"{name}: {problem}")
    if any(part.partial_shape for part in parts):
        raise TraceError(f"{name} is a sum over ranks")
    first = _read(next(iter(by_rank.values())))
    flat = torch.empty(math.prod(parts[0].region.global_shape), dtype=first.dtype)
    for part in one_copy(parts):
        local = _read(by_rank[part.rank])
        for dim, size in enumerate(part.region.shape):
            local = local.narrow(dim, 0, size)
        if part.region.size:
            flat[torch.cat(list(indices(part.region)))] = local.flatten()
    return flat.reshape(parts[0].region.global_shape)
