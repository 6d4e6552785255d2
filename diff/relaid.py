"""A trace as a layout file describes it: names and shards are the file's, fused tensors are views."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.diff.spares import spare_notes
from tensortrace.diff.stated import states, with_stated
from tensortrace.diff.windows import windowed
from tensortrace.tracer import layout as files
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.rules import RunLayout, View
from tensortrace.tracer.rules.run import MESH
from tensortrace.tracer.types import ROOT, STAGE, Entry, Kind, Manifest

Take = Callable[[np.ndarray], np.ndarray]

_Key = tuple[int, str]
"""What an entry is known by here whatever name it goes by later: its event, and the digest of its part."""

_NAMED = frozenset(Kind) - {
    Kind.RNG, Kind.COLLECTIVE, Kind.SCHEDULE, Kind.OPERATION, Kind.OPERATION_GRAD,
}  # fmt: skip
"""Kinds whose names are of parameters, buffers and modules."""


def laid_out(trace: Trace, path: Path | None) -> tuple[Trace, tuple[str, ...]]:
    """Return a trace as a layout file describes it, or the file recorded with it, and as the program says.

    What a reader must know of it comes with it. Raises LayoutFileError where the file cannot be read or does
    not fit the trace.
    """
    stored = trace.path / files.LAYOUT
    path = path or (stored if stored.is_file() else None)
    layout = None if path is None else RunLayout.load(path)
    kept, of_window = windowed(trace)
    said, notes = with_stated(kept, layout)
    return said if layout is None else relaid(said, layout), (
        *of_window, *spare_notes(kept), *notes,
    )  # fmt: skip


def relaid(trace: Trace, layout: RunLayout) -> Trace:
    """Return a trace under a layout; raises LayoutFileError where the layout does not fit it.

    A boundary with a rule gets the rule's name and shard, or one entry for each tensor that it is a part of.
    One without keeps its own shard. One whose name is renamed to nothing is left out.
    """
    layout.check_world(
        max((r.manifest.world_size for r in trace.ranks if r.manifest), default=len(trace.ranks))
    )
    ranks = tuple(RelaidRank(rank, layout) for rank in trace.ranks)
    return RelaidTrace(trace.path, trace.manifest, ranks, trace.problems, layout)


_BETWEEN = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD})


class RelaidTrace(Trace):
    """A trace under a layout."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest | None,
        ranks: tuple[RankTrace, ...],
        problems: tuple[str, ...],
        layout: RunLayout,
    ) -> None:
        super().__init__(path, manifest, ranks, problems)
        self.layout = layout


class RelaidRank(RankTrace):
    """One rank under a layout: its entries (or some) are rewritten, and reading one takes its part."""

    def __init__(self, rank: RankTrace, layout: RunLayout, only: tuple[Entry, ...] | None = None) -> None:
        self._base = rank
        self._last: tuple[_Key, np.ndarray] | None = None
        self._taken: dict[_Key, tuple[Entry, Take]] = {}
        self._shared: dict[_Key, tuple[View, ...]] = {}
        self._left_out: set[int] = set()
        self.mesh = layout.mesh
        recorded = rank.entries if only is None else only
        entries = tuple(new for entry in recorded for new in self._entries(entry, layout))
        manifest = rank.manifest
        if manifest is not None:
            fewer = len(recorded) - len(entries)  # left out on purpose, which is no loss
            count = max(manifest.boundaries - fewer, 0)
            manifest = replace(manifest, meshes=manifest.meshes | {MESH: layout.mesh}, boundaries=count)
        super().__init__(rank.folder, rank.rank, rank.attempt, manifest, entries, (), rank.limit_bytes)
        self.problems = rank.problems

    def stored(self, entry: Entry) -> bool:
        """Tell whether the bytes that an entry is taken from are there."""
        return self._base.stored(self._source(entry))

    def read(self, entry: Entry) -> np.ndarray:
        """Return the entry's part of what the rank recorded; raises as ``RankTrace.read`` does."""
        found = self._taken.get(_key(entry))
        return self._base.read(entry) if found is None else found[1](self._base.read(found[0]))

    def read_recorded(self, entry: Entry) -> np.ndarray:
        """Return the tensor that an entry is a part of, padding included; raises as ``RankTrace.read``."""
        return self._base.read(self._source(entry))

    def read_range(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Return elements of the entry's flattened part; what is a view of another tensor is read whole."""
        key = _key(entry)
        if key not in self._taken:
            return self._base.read_range(entry, start, stop)
        if self._last is None or self._last[0] != key:
            self._last = (key, np.ravel(self.read(entry)))
        return self._last[1][start:stop]

    def shared(self, entry: Entry) -> tuple[View, ...]:
        """Return the blocks of an entry that other ranks have copies of, beside blocks that are split."""
        return self._shared.get(_key(entry), ())

    def read_shared(self, entry: Entry, view: View) -> np.ndarray:
        """Return such a block as this rank recorded it; raises as ``read``."""
        return view.take(self._base.read(self._source(entry)))

    def _source(self, entry: Entry) -> Entry:
        found = self._taken.get(_key(entry))
        return entry if found is None else found[0]

    def _entries(self, entry: Entry, layout: RunLayout) -> list[Entry]:
        entry = _with_names(entry, layout, self._base.rank)
        if entry.kind in (Kind.OPERATION, Kind.OPERATION_GRAD):
            return [replace(entry, name=layout.canonical(entry.name, self._base.rank) or entry.name)]
        if entry.kind not in _NAMED:
            return [entry]
        name = layout.canonical(entry.name, self._base.rank)
        if name == ROOT and _is_between_stages(entry, layout, self._base.rank):
            return [replace(entry, name=f"{STAGE}{layout.stage(self._base.rank)[0]})")]
        if not name:
            self._left_out.add(entry.event)
            return []
        if entry.kind == Kind.INPUT and not self._left_out.isdisjoint(entry.producers):
            outside = tuple(event for event in entry.producers if event not in self._left_out)
            entry = replace(entry, producers=outside)  # another chunk was given it before
        if states(entry) and entry.shard is not None and not layout.names_exactly(entry, name):
            return [replace(entry, name=name)]  # the program knows this one tensor better than a glob does
        views = layout.views(entry.kind, entry.slot, entry.name, self._base.rank, entry.local_shape)
        made = [self._entry(entry, view) for view in views] or [replace(entry, name=name)]
        if layout.shares(entry.kind, entry.slot, name) and self._base.stored(entry):
            shared = layout.views(
                entry.kind, entry.slot, entry.name, self._base.rank, entry.local_shape, copies="shared"
            )
            for new in made:
                own = tuple(view for view in shared if view.name == new.name)
                self._shared[_key(new)] = own
        return made

    def _entry(self, entry: Entry, view: View) -> Entry:
        new = replace(entry, name=view.name, slot=view.slot, shard=view.shard, shard_ref=None)
        if view.whole:
            return new if _is_plain(entry, view) else replace(new, sketch=None)
        new = replace(new, local_shape=view.local_shape, stats=None, sketch=None, digest=_digest(entry, view))
        self._taken[_key(new)] = (entry, view.take)
        return new


def _is_plain(entry: Entry, view: View) -> bool:
    """Tell whether a layout leaves the indices of a tensor, by which its sketch goes, as recorded."""
    cuts = ("shard", "strided_shard", "flat")
    return entry.shard == view.shard or not any(
        p.kind in cuts for shard in (entry.shard, view.shard) if shard for p in shard.placements
    )


def _with_names(entry: Entry, layout: RunLayout, rank: int) -> Entry:
    """Return the entry with the parameters of a group or a clip, and other names of its own, renamed."""
    if not (entry.meta.members or entry.meta.aliases):
        return entry
    members = tuple(name for member in entry.meta.members for name in layout.names(member, rank) if name)
    aliases = tuple(layout.canonical(name, rank) for name in entry.meta.aliases)
    return replace(entry, meta=replace(entry.meta, members=members, aliases=aliases))


def _is_between_stages(entry: Entry, layout: RunLayout, rank: int) -> bool:
    """Tell whether a stage of a pipeline was given a tensor by the stage before, or gives it to the next.

    No rule is asked for: floating-point tensors that the module of a later stage is given, and what that of
    any but the last returns. Token ids, masks and labels are given to whom they concern.
    """
    number, count = layout.stage(rank)
    if count == 1 or entry.kind not in _BETWEEN or layout.rule(entry.kind, entry.slot, ROOT):
        return False
    if entry.slot.startswith("in"):
        return number > 0 and "float" in entry.dtype
    return number < count - 1 and entry.slot.startswith("out")


def _key(entry: Entry) -> _Key:
    return entry.event, entry.digest


def _digest(entry: Entry, view: View) -> str:
    """Return a digest of a part: equal where equal parts were taken of equal tensors."""
    return xxhash.xxh3_128_hexdigest(f"{entry.digest} {view.picked}".encode())
