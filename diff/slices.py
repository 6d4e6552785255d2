"""Flat vectors that programs keep of all their parameters, taken apart: each slice is a parameter's master.

A program that shards its optimizer by hand lays its parameters end to end in float32, gives each rank's
optimizer one part of the vector, and copies the whole back. Where a parameter lies tell the first values of
both; what stays zero at the vector's end is padding. A slice is a master of its parameter like any other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.diff.masters import Masters, find_masters, is_copy, unowned
from tensortrace.diff.ties import OF_PARAMETERS
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Box, Entry, Kind, Mesh, Placement, Shard

MESH = "masters"
"""The mesh of the ranks that share a flat vector."""

_MOST = 1 << 28
"""Elements of a flat vector beyond which no parameters are sought in it."""


class Cut(NamedTuple):
    """What one rank's part of a vector holds of a parameter: elements [start, stop) of the part.

    They are those from ``offset`` on of the flattened parameter, which has ``shape``.
    """

    parameter: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


class _Vector(NamedTuple):
    """A flat master: its values over all ranks, where each rank's part begins and how long it is.

    Behind ``filled`` elements are zero from the first to the last step.
    """

    values: np.ndarray
    filled: int
    parts: Mapping[int, tuple[int, int]]


Place = tuple[str, int]
"""The name of a vector, and where in it a parameter begins."""


Copies = Mapping[str, tuple[Entry, np.ndarray]]
"""Parameters of modules with their first values, in the modules' order."""


def cut_flat(ranks: Sequence[RankTrace]) -> Sequence[RankTrace]:
    """Return the ranks with their flat masters taken apart; as they are where not all of that is known."""
    if any(type(rank) is not RankTrace for rank in ranks) or not any(map(_may_be_flat, ranks)):
        return ranks  # a layout file says what there is
    alone = {rank.rank: find_masters(rank) for rank in ranks}
    vectors, copies = _vectors(ranks, alone), _copies(ranks, alone)
    places = _places(vectors, copies) if vectors and copies else None
    if places is None:
        return ranks
    shapes = {name: entry.local_shape for name, (entry, _) in copies.items()}
    return [SlicedRank(rank, vectors, places, shapes, [r.rank for r in ranks]) for rank in ranks]


def _may_be_flat(rank: RankTrace) -> bool:
    copies, masters = unowned(rank)
    shapes = {entry.local_shape for entry in copies}
    return bool(copies) and any(len(m.local_shape) == 1 and m.local_shape not in shapes for m in masters)


def _vectors(ranks: Sequence[RankTrace], alone: Mapping[int, Masters]) -> dict[str, _Vector]:
    """Return the vectors that optimizers hold and no pass gives a gradient, parts in order of ranks."""
    held: dict[str, list[tuple[RankTrace, Entry]]] = defaultdict(list)
    for rank in ranks:
        for entry in unowned(rank)[1]:
            if len(entry.local_shape) == 1 and entry.shard is None and entry.name not in alone[rank.rank]:
                held[entry.name].append((rank, entry))
    found = {}
    for name, members in held.items():
        of_rank = {rank.rank: _identity(rank, entry) for rank, entry in members}
        pieces: dict[tuple[str, ...], tuple[RankTrace, Entry]] = {}
        for rank, entry in members:
            pieces.setdefault(of_rank[rank.rank], (rank, entry))  # equal ones are copies
        sizes = [entry.local_shape[0] for _, entry in pieces.values()]
        if sum(sizes) > _MOST:
            continue
        begins = dict(zip(pieces, accumulate(sizes, initial=0), strict=False))
        values = np.concatenate([rank.read(entry) for rank, entry in pieces.values()])
        parts = {rank.rank: (begins[of_rank[rank.rank]], entry.local_shape[0]) for rank, entry in members}
        after = np.concatenate([_last(rank, entry) for rank, entry in pieces.values()])
        filled = np.flatnonzero((values != 0) | (after != 0))
        found[name] = _Vector(values, int(filled[-1]) + 1 if len(filled) else 0, parts)
    return found


def _identity(rank: RankTrace, first: Entry) -> tuple[str, ...]:
    """Return what tells a part from another rank's: its first values, or all where these are one number."""
    values = rank.read(first)
    constant = bool(values.size) and bool(np.all(values == values[0]))
    return tuple(e.digest for e in _values(rank, first)) if constant else (first.digest,)


def _last(rank: RankTrace, first: Entry) -> np.ndarray:
    """Return the last values of a parameter."""
    return rank.read([entry for entry in _values(rank, first) if rank.stored(entry)][-1])


def _values(rank: RankTrace, first: Entry) -> list[Entry]:
    """Return what was recorded of a parameter, in order."""
    key = (Kind.PARAM, first.name, first.slot, first.local_shape)
    return sorted(
        (e for e in rank.entries if (e.kind, e.name, e.slot, e.local_shape) == key), key=lambda e: e.event
    )


def _copies(ranks: Sequence[RankTrace], alone: Mapping[int, Masters]) -> Copies:
    """Return the parameters that passes compute with and no optimizer holds; none where ranks differ."""
    found: dict[str, tuple[Entry, np.ndarray]] = {}
    for rank in ranks:
        for entry in unowned(rank)[0]:
            if entry.name in alone[rank.rank].values():
                continue
            if entry.name not in found:
                found[entry.name] = entry, rank.read(entry)
            elif entry.digest != found[entry.name][0].digest:
                return {}
    return found


def _places(vectors: Mapping[str, _Vector], copies: Copies) -> dict[str, Place] | None:
    """Return where each parameter begins; None unless vectors hold all of them, and else only padding.

    Each vector has them in the modules' order, which alone tells parameters of equal values apart.
    """
    found: dict[str, Place] = {}
    for name, vector in vectors.items():
        left = iter([(parameter, *copy) for parameter, copy in copies.items() if parameter not in found])
        begin = 0
        while begin < vector.filled:
            rest = vector.values[begin:]
            parameter = next((p for p, entry, values in left if _begins_with(rest, entry, values)), None)
            if parameter is None:
                return None
            found[parameter] = name, begin
            begin += copies[parameter][1].size
    return found if len(found) == len(copies) else None


def _begins_with(rest: np.ndarray, entry: Entry, values: np.ndarray) -> bool:
    """Tell whether a vector begins with a parameter, rounded or not."""
    flat = values.ravel()
    if not 0 < len(flat) <= len(rest):
        return False
    return all(is_copy(rest[:n], flat[:n], entry.dtype) for n in (1, len(flat)))


class SlicedRank(RankTrace):
    """One rank whose flat masters are taken apart: reading an entry of a slice takes it from the vector."""

    def __init__(
        self,
        rank: RankTrace,
        vectors: Mapping[str, _Vector],
        places: Mapping[str, Place],
        shapes: Mapping[str, tuple[int, ...]],
        ranks: Sequence[int],
    ) -> None:
        self._base = rank
        self._taken: dict[tuple[int, str], tuple[Entry, Cut]] = {}
        self._coordinate = list(ranks).index(rank.rank)
        self._parted = {
            name for name, v in vectors.items() if any(size < len(v.values) for _, size in v.parts.values())
        }
        self._lengths = {name: v.parts.get(rank.rank, (0, 0))[1] for name, v in vectors.items()}
        self._cuts = {name: tuple(_cuts(name, rank.rank, vectors[name], places, shapes)) for name in vectors}
        manifest = rank.manifest
        if manifest is not None:
            mesh = Mesh(("rank",), (len(ranks),), tuple(ranks))
            manifest = replace(manifest, meshes=manifest.meshes | {MESH: mesh})
        entries = tuple(new for entry in rank.entries for new in self._entries(entry))
        super().__init__(rank.folder, rank.rank, rank.attempt, manifest, entries, (), rank.limit_bytes)
        self.problems = rank.problems
        self.masters: Masters = {_slice_name(vector, name): name for name, (vector, _) in places.items()}

    def stored(self, entry: Entry) -> bool:
        """Tell whether the bytes that an entry is taken from are there."""
        found = self._taken.get((entry.event, entry.digest))
        return self._base.stored(found[0] if found else entry)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the entry's slice of what the rank recorded; raises as ``RankTrace.read`` does."""
        found = self._taken.get((entry.event, entry.digest))
        if found is None:
            return self._base.read(entry)
        return self._base.read(found[0])[found[1].start : found[1].stop].reshape(entry.local_shape)

    def read_range(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Return elements of the flattened slice; raises as ``RankTrace.read_range`` does."""
        found = self._taken.get((entry.event, entry.digest))
        if found is None:
            return self._base.read_range(entry, start, stop)
        first = found[1].start
        return self._base.read_range(found[0], first + start, first + stop)

    def _entries(self, entry: Entry) -> Iterator[Entry]:
        if any(name in self._cuts for name in entry.meta.members):
            members = tuple(new for name in entry.meta.members for new in self._names(name))
            entry = replace(entry, meta=replace(entry.meta, members=members))
        if entry.kind not in OF_PARAMETERS or entry.name not in self._cuts:
            yield entry
            return
        for cut in self._cuts[entry.name]:
            yield self._slice(entry, cut)

    def _names(self, member: str) -> tuple[str, ...]:
        cuts = self._cuts.get(member)
        return (member,) if cuts is None else tuple(_slice_name(member, cut.parameter) for cut in cuts)

    def _slice(self, entry: Entry, cut: Cut) -> Entry:
        new = replace(entry, name=_slice_name(entry.name, cut.parameter))
        if entry.local_shape != (self._lengths[entry.name],):
            return new  # a number that the whole vector has one of, such as the count of steps
        key = f"{entry.digest} {cut.start} {cut.stop}"
        shard, shape = None, cut.shape
        if entry.name in self._parted:
            box, shape = Box((cut.offset,), (cut.size,)), (cut.size,)
            shard = Shard(MESH, (self._coordinate,), (Placement("flat"),), cut.shape, (box,))
        new = replace(
            new, local_shape=shape, shard=shard, shard_ref=None, stats=None, sketch=None,
            digest=xxhash.xxh3_128_hexdigest(key.encode()),
        )  # fmt: skip
        self._taken[(new.event, new.digest)] = (entry, cut)
        return new


def _slice_name(vector: str, parameter: str) -> str:
    return f"{vector}[{parameter}]"


def _cuts(
    name: str, rank: int, vector: _Vector, places: Mapping[str, Place], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Cut]:
    """Yield what one rank's part of a vector holds of each parameter, in order."""
    begin, size = vector.parts.get(rank, (0, 0))
    for parameter, (of, place) in sorted(places.items(), key=lambda found: found[1]):
        first, stop = max(place, begin), min(place + math.prod(shapes[parameter]), begin + size)
        if of == name and first < stop:
            yield Cut(parameter, shapes[parameter], first - begin, stop - begin, first - place)
