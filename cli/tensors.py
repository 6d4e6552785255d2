"""The tensors of a trace that a request selects, each with what its index line says and maybe its values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensortrace.cli.contents import SCHEMA, Contents, Shown, contents_of
from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.request import Request
from tensortrace.tracer.types import INIT_STEP, Entry, Key, Kind, Mesh, Meta, Shard, Stats

MAX_VALUES = 4096
"""Values of one tensor that JSON holds, from the front in row-major order."""

Value = float | int | bool | tuple[float, float]
Match = tuple[RankTrace, Entry]


class Producer(Shown, frozen=True):
    """A boundary of the same rank that a tensor was computed from."""

    event: int
    kind: Kind
    name: str
    slot: str


class TensorRow(Shown, frozen=True, kw_only=True):
    """One tensor at one boundary on one rank. ``step`` counts from 0 or is ``init``.

    ``stored`` tells whether its bytes are there; ``same_as`` is the event whose bytes they are. ``values``
    are the first 4096 in row-major order, ``values_left_out`` counts the others; None where not asked for.
    """

    rank: int
    event: int
    step: int | str
    microbatch: int | None
    kind: Kind
    name: str
    slot: str
    call: int
    recompute: bool
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    stored_bytes: int
    stored: bool
    same_as: int | None
    sketch: str | None
    digest: str
    stats: Stats | None
    shard: Shard | None
    mesh: Mesh | None
    producers: tuple[Producer, ...]
    meta: Meta
    values: tuple[Value, ...] | None = None
    values_left_out: int = 0


class Document(Shown, frozen=True, kw_only=True):
    """All that ``trace show --json`` writes; ``tensors`` is empty unless the request narrows."""

    schema: str = SCHEMA
    trace: Contents
    tensors: tuple[TensorRow, ...]


class Found:
    """The entries of an open trace that a request selects, in order of step and event; reads on demand."""

    def __init__(self, trace: Trace, request: Request) -> None:
        """Select; raises BadRequest where nothing matches."""
        self.matches: list[Match] = [
            (rank, entry) for rank in trace.ranks for entry in rank.entries if request.wants(rank.rank, entry)
        ]
        if request and not self.matches:
            likely = nothing_matches(trace, request)
            raise BadRequest(f"no boundary of {trace.path} matches", remedy=likely)
        self.matches.sort(key=lambda match: (match[1].step, match[1].event, match[0].rank))
        self._events = {rank.rank: {entry.event: entry for entry in rank.entries} for rank in trace.ranks}

    def keys(self) -> set[Key]:
        """Return the distinct keys that were found."""
        return {entry.key for _, entry in self.matches}

    def read(self, match: Match) -> NDArray[np.generic] | None:
        """Return the tensor of a match, its digest checked; None where its bytes were not kept."""
        rank, entry = match
        return rank.read(entry) if rank.stored(entry) else None

    def row(self, match: Match, values: NDArray[np.generic] | None = None) -> TensorRow:
        """Return what is known of a match, and its first values where given."""
        rank, entry = match
        shard, manifest = entry.shard, rank.manifest
        return TensorRow(
            rank=rank.rank,
            event=entry.event,
            step="init" if entry.step == INIT_STEP else entry.step,
            microbatch=entry.microbatch,
            kind=entry.kind,
            name=entry.name,
            slot=entry.slot,
            call=entry.call,
            recompute=entry.recompute,
            dtype=entry.dtype,
            shape=entry.local_shape,
            raw_bytes=size_bytes(entry.dtype, entry.local_shape),
            stored_bytes=entry.blob.length if entry.blob else 0,
            stored=rank.stored(entry),
            same_as=entry.same_as,
            sketch=None if entry.sketch is None else "{}x{}".format(*entry.sketch.size),
            digest=entry.digest,
            stats=entry.stats,
            shard=shard,
            mesh=manifest.meshes.get(shard.mesh) if shard and manifest else None,
            producers=self._producers(rank.rank, entry),
            meta=entry.meta,
            values=None if values is None else _plain(values),
            values_left_out=0 if values is None else max(values.size - MAX_VALUES, 0),
        )

    def _producers(self, rank: int, entry: Entry) -> tuple[Producer, ...]:
        found = (self._events[rank].get(event) for event in entry.producers)
        return tuple(Producer(each.event, each.kind, each.name, each.slot) for each in found if each)


def nothing_matches(trace: Trace, request: Request) -> str:
    """Return what a request that matches nothing may have meant, else how to see what there is."""
    near = request.nearest_name(entry.name for rank in trace.ranks for entry in rank.entries)
    return meant(near) or f"`trace show {trace.path}` says which steps, kinds and ranks there are"


def document(trace: Trace, request: Request, *, with_values: bool) -> Document:
    """Return the JSON document for a request."""
    if not request:
        return Document(trace=contents_of(trace), tensors=())
    found = Found(trace, request)
    rows = (found.row(match, found.read(match) if with_values else None) for match in found.matches)
    return Document(trace=contents_of(trace), tensors=tuple(rows))


def _plain(values: NDArray[np.generic]) -> tuple[Value, ...]:
    """Return the first values as Python numbers, complex ones as (real, imaginary)."""
    flat = values.reshape(-1)[:MAX_VALUES]
    if flat.dtype.kind == "c":
        return tuple((float(value.real), float(value.imag)) for value in flat.tolist())
    return tuple(flat.tolist())
