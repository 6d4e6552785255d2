"""The ranks' recorded parts of a tensor, and the global tensor that they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.geometry import Held, held
from tensortrace.tracer.geometry_cover import check, one_copy
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.rules import RunLayout, View
from tensortrace.tracer.start.places import indices
from tensortrace.tracer.types import Entry, Shard


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


def named(rank: RankTrace, entry: Entry, layout: RunLayout | None) -> list[tuple[str, Source]]:
    """Return what a rank's record holds under the names of the unpartitioned program."""
    if layout is None:
        return [(entry.name, Source(rank, entry))]
    if entry.shard is None:
        views = layout.views(entry.kind, entry.slot, entry.name, rank.rank, entry.local_shape)
        if views:
            return [(view.name, Source(rank, entry, view)) for view in views]
    return [(layout.canonical(entry.name, rank.rank) or entry.name, Source(rank, entry))]


def shape_of(sources: Sequence[Source]) -> tuple[int, ...]:
    """Return the shape of the global tensor."""
    first = sources[0]
    return (first.shard.global_shape if first.shard else None) or first.entry.local_shape


def assembled(name: str, sources: Sequence[Source], layout: RunLayout | None) -> torch.Tensor:
    """Return the global tensor; raise TraceError naming it where its parts don't make one."""
    if all(source.shard is None for source in sources):
        if len({source.entry.digest for source in sources}) > 1:
            raise TraceError(f"{name}: its parts on {len(sources)} ranks have no known layout")
        return sources[0].read()
    by_rank = {source.rank.rank: source for source in sources if source.shard is not None}
    parts = [_held(name, source, layout) for source in by_rank.values()]
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


def _held(name: str, source: Source, layout: RunLayout | None) -> Held:
    number, entry = source.rank.rank, source.entry
    if source.view is not None and layout is not None:
        return held(number, source.view.shard, layout.mesh, source.view.local_shape)
    if entry.shard is None or source.rank.manifest is None:
        raise TraceError(f"{name}: rank {number} has no {source.rank.folder.name}/rank.json")
    mesh = source.rank.manifest.meshes[entry.shard.mesh]
    return held(number, entry.shard, mesh, entry.local_shape)
