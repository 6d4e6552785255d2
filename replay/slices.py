"""Tensors cut down to a part of themselves, in a trace that is read as if no more had been recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from msgspec.structs import replace

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, values
from tensortrace.tracer.codec_values import digest, statistics
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, RankManifest, Shard

Span = tuple[int, int]
"""Where a part begins in a dimension, and where it has ended."""

Spans = tuple[Span, ...]
"""One for each dimension."""

_WHOLE = frozenset({"replicate", "partial", "data"})


def can_be_cut(entry: Entry) -> bool:
    """Tell whether a tensor lies whole on its rank, so that a part of it lies at the same place on each."""
    shard = entry.shard
    return shard is None or (
        all(placement.kind in _WHOLE for placement in shard.placements)
        and not shard.boxes
        and not any(shard.padding)
        and (shard.global_shape is None or len(shard.global_shape) == len(entry.local_shape))
    )


def take(entry: Entry, data: Bytes, spans: Spans) -> Bytes:
    """Return the logical bytes of a part of a tensor, given those of all of it."""
    elements = data.reshape(*entry.local_shape, dtype_of(entry.dtype).itemsize)
    part = elements[tuple(slice(*span) for span in spans)]
    return np.ascontiguousarray(part).reshape(-1)


def sliced(entry: Entry, data: Bytes, spans: Spans) -> Entry:
    """Return the entry of a part of a tensor, given the bytes of all of it; where they lie stays."""
    part = take(entry, data, spans)
    shape = tuple(end - begin for begin, end in spans)
    return replace(
        entry, local_shape=shape, digest=digest(entry.dtype, shape, part), sketch=None,
        stats=statistics(entry.dtype, part), shard=entry.shard and _shard(entry.shard, entry, spans),
    )  # fmt: skip


def _shard(shard: Shard, entry: Entry, spans: Spans) -> Shard:
    if shard.global_shape is None:
        return shard
    cut = zip(shard.global_shape, entry.local_shape, spans, strict=True)
    return replace(
        shard, global_shape=tuple(n if (0, own) == span else span[1] - span[0] for n, own, span in cut)
    )


class SlicedRank(RankTrace):
    """A rank some of whose tensors are parts of what it recorded: ``parts`` by event."""

    def __init__(
        self,
        base: RankTrace,
        manifest: RankManifest | None,
        entries: tuple[Entry, ...],
        parts: Mapping[int, Spans],
    ) -> None:
        super().__init__(base.folder, base.rank, base.attempt, manifest, entries, (), base.limit_bytes)
        self._base = base
        self._parts = parts
        self._whole = {entry.event: entry for entry in base.entries if entry.event in parts}

    def read_bytes(self, entry: Entry, *, checksums: bool = False) -> Bytes:
        """Return the logical bytes of what is kept of a tensor; raises as ``RankTrace.read_bytes`` does."""
        holder = entry.event if entry.same_as is None else entry.same_as
        if holder not in self._parts or self.blob_of(entry) is None:
            return super().read_bytes(entry, checksums=checksums)
        whole = self._whole[holder]
        return take(whole, self._base.read_bytes(whole), self._parts[holder])

    def read_range(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Return elements of the flattened tensor; one that is a part is read whole."""
        return values(entry.dtype, self.read_bytes(entry))[start:stop]

    def through(self, entry: Entry, most: int) -> Iterator[np.ndarray]:
        """Yield the tensor in blocks; see ``RankTrace.through``."""
        yield from self.blocks(entry, most)
