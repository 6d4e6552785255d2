"""A part of an opened trace: some of its boundaries, some of them without values, read as any other trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from msgspec.structs import replace

from tensortrace.replay.slices import SlicedRank, Spans, sliced
from tensortrace.tracer.reader import Trace, share_copies
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, Module

MODULES = "modules"
"""What a manifest tells of modules, which replay reads; older versions ignore it."""


class Atom(NamedTuple):
    """One boundary of one of the traces: ``side`` counts them from 0, ``event`` is of the rank."""

    side: int
    rank: int
    event: int


class Part(NamedTuple):
    """What is kept of one or two traces: boundaries, those of them that keep no values, and parts of some."""

    kept: frozenset[Atom]
    bare: frozenset[Atom] = frozenset()
    spans: Mapping[Atom, Spans] = {}

    def without(self, atoms: frozenset[Atom]) -> Part:
        """Return the part that lacks some boundaries, too."""
        return self._replace(kept=self.kept - atoms, bare=self.bare - atoms)

    def bared(self, atoms: frozenset[Atom]) -> Part:
        """Return the part in which these boundaries, too, keep digest and statistics alone."""
        return self._replace(bare=self.bare | (atoms & self.kept))


def whole(traces: Iterable[Trace]) -> Part:
    """Return the part that is everything."""
    return Part(frozenset(atom for atom, _ in atoms_of(traces)))


def atoms_of(traces: Iterable[Trace]) -> Iterator[tuple[Atom, Entry]]:
    """Yield every boundary of the traces, in order."""
    for side, trace in enumerate(traces):
        for rank in trace.ranks:
            for entry in rank.entries:
                yield Atom(side, rank.rank, entry.event), entry


def cut(traces: Iterable[Trace], part: Part) -> tuple[Trace, ...]:
    """Return the traces as if no more than a part had been recorded; ranks without any are left out."""
    return tuple(_cut_trace(side, trace, part) for side, trace in enumerate(traces))


def _cut_trace(side: int, trace: Trace, part: Part) -> Trace:
    ranks = tuple(found for rank in trace.ranks if (found := _cut_rank(side, rank, part)).entries)
    manifest = trace.manifest and replace(
        trace.manifest, ranks=tuple(rank.folder.name for rank in ranks), ignorable=()
    )
    share_copies(ranks)
    return Trace(trace.path, manifest, ranks, tuple(problem for rank in ranks for problem in rank.problems))


def _cut_rank(side: int, rank: RankTrace, part: Part) -> RankTrace:
    kept = [entry for entry in rank.entries if Atom(side, rank.rank, entry.event) in part.kept]
    bare = {atom.event for atom in part.bare if atom[:2] == (side, rank.rank)}
    spans = {atom.event: found for atom, found in part.spans.items() if atom[:2] == (side, rank.rank)}
    entries = tuple(_rewritten(rank, kept, bare, spans))
    manifest = rank.manifest
    if manifest is not None:
        called = {entry.name for entry in entries}
        manifest = replace(
            manifest, boundaries=len(entries), modules=tuple(_of_modules(manifest.modules, called)),
            ignorable=tuple(key for key in manifest.ignorable if key == MODULES),
        )  # fmt: skip
    if spans:
        return SlicedRank(rank, manifest, entries, spans)
    return RankTrace(rank.folder, rank.rank, rank.attempt, manifest, entries, (), rank.limit_bytes)


def _of_modules(modules: Iterable[Module], called: AbstractSet[str]) -> Iterator[Module]:
    """Yield what is known of the modules that something is kept of."""
    for module in modules:
        names = tuple(name for name in module.names if name in called)
        if names:
            yield replace(module, names=names)


def _rewritten(
    rank: RankTrace, kept: list[Entry], bare: set[int], spans: Mapping[int, Spans]
) -> Iterator[Entry]:
    """Yield entries that refer to each other only: the first that is kept of a content has its bytes."""
    events = {entry.event for entry in kept}
    holders: dict[str, int] = {}
    for entry in kept:
        producers = tuple(event for event in entry.producers if event in events)
        blob = None if entry.event in bare else rank.blob_of(entry)
        if entry.event in spans:
            entry = sliced(entry, rank.read_bytes(entry), spans[entry.event])
        holder = holders.get(entry.digest) if blob is not None else None
        if blob is not None:
            holders.setdefault(entry.digest, entry.event)
        yield replace(
            entry, producers=producers, blob=blob if holder is None else None, same_as=holder,
            shard_ref=None, sketch_ref=None,
        )  # fmt: skip
