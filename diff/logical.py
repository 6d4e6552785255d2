"""Logical tensors: what several ranks hold of one boundary, as one item or as one item per copy.

Ranks of one data cell hold parts of the same tensor, or copies of it; after a reduction over data ranks the
same is true of all ranks. Everything after this module sees whole tensors and knows of no shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.diff.cells import Cells
from tensortrace.diff.shared import odd_shared
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.geometry import Held, LayoutError, held
from tensortrace.tracer.geometry_blocks import blocks, fill, place
from tensortrace.tracer.geometry_cover import check, copies, odd_replicas, one_copy
from tensortrace.tracer.types import Entry, Kind, Mesh, Placement, Stats

CELL_KINDS = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD})
"""Kinds of which every data cell has its own; of the others all ranks hold one."""

WHOLE = Placement(kind="replicate")


class Source(Protocol):
    """Who holds a tensor: a rank, or several together."""

    @property
    def rank(self) -> int:
        """The global rank, the lowest of several."""

    def stored(self, entry: Entry) -> bool:
        """Tell whether the entry's bytes are there."""

    def read(self, entry: Entry) -> np.ndarray:
        """Return the tensor, of the entry's ``local_shape``."""

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the tensor in the boxes of ``block_grid``, of at most ``most`` elements, or one alone."""


class RankSource(Source, Protocol):
    """One rank, as it recorded or as a layout file describes it."""

    def read_range(self, entry: Entry, start: int, stop: int) -> np.ndarray:
        """Return the elements [start, stop) of the flattened tensor."""


@dataclass(frozen=True)
class Member:
    """One rank's entry of a boundary."""

    source: RankSource
    entry: Entry

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.source.rank


@dataclass(frozen=True)
class Together:
    """What several ranks hold of one boundary; ``members`` are in order of rank."""

    members: tuple[Member, ...]

    @property
    def rank(self) -> int:
        """The lowest rank, after which the tensor is named."""
        return self.members[0].rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold one or a part of one."""
        return tuple(member.rank for member in self.members)


@dataclass(frozen=True)
class Merged(Together):
    """A tensor that several ranks hold together: stands in the place of a rank in an item.

    ``parts`` say where the chosen members' tensors lie; ``members`` are all that hold a part or a copy of
    one. ``odd`` are ranks whose copy differs from the other copies; ``problem`` says why the parts make no
    tensor, and reading raises it.
    """

    parts: tuple[Held, ...]
    odd: tuple[int, ...] = ()
    problem: str | None = None

    def stored(self, entry: Entry) -> bool:
        """Tell whether every part's bytes are there."""
        return self.problem is None and all(m.source.stored(m.entry) for m in self.chosen)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the whole tensor, of the merged entry's shape; sums of contributions are float64.

        Raises Unplaceable where the members make no tensor, and as the ranks' own ``read`` does.
        """
        if self.problem:
            raise Unplaceable(self.problem)
        arrays = {m.rank: m.source.read(m.entry) for m in self.chosen}
        return place(arrays, self.parts)

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the whole tensor in the boxes of ``block_grid``, of at most ``most`` elements, or one alone.

        Raises as ``read`` does.
        """
        if self.problem:
            raise Unplaceable(self.problem)
        if math.prod(entry.local_shape) <= most:
            if 0 not in entry.local_shape and not only:
                yield self.read(entry)
            return
        members = {m.rank: m for m in self.chosen}

        def read(rank: int, start: int, stop: int) -> np.ndarray:
            return members[rank].source.read_range(members[rank].entry, start, stop)

        for number, block in enumerate(blocks(self.parts, most)):
            if only is None or only == number:
                yield fill(block, read)

    @property
    def chosen(self) -> tuple[Member, ...]:
        """The members that are read."""
        return tuple(_of(self.members, self.parts))


class Unplaceable(TraceError):
    """Parts of ranks that make no whole tensor; the text names ranks and ranges."""


class Unkept(Unplaceable):
    """Elements of a tensor that was not stored with its values; the text says what was."""


NOT_STORED = "its values were not stored"

MADE_OF_UNSTORED = f"{NOT_STORED}, or those of what brings it to one scale and order"

NO_LAYOUT = "no layout is known"


def no_layout(ranks: Sequence[int]) -> Unplaceable:
    """Return the error for tensors of several ranks that are no copies and of which nothing says more."""
    return Unplaceable(
        f"ranks {', '.join(map(str, ranks))} hold different tensors and {NO_LAYOUT}",
        remedy="find one with `trace layout a/ b/ -o layout.toml`, then diff with --layout layout.toml",
    )


@dataclass(frozen=True)
class Unlabelled(Together):
    """Different tensors of the ranks of one cell, of which no layout is known.

    ``diff.unlabelled`` replaces it where the other run tells how they belong together.
    """

    def stored(self, entry: Entry) -> bool:
        """Return False: nobody knows what the whole tensor is, so there is none to read."""
        return False

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Raise as ``read`` does."""
        yield self.read(entry)

    def read(self, entry: Entry) -> np.ndarray:
        """Raise: nobody knows what the whole tensor is."""
        raise no_layout(self.ranks)


Logical = tuple[Source, Entry]
"""Who holds a tensor, and the entry that describes it."""


@dataclass(frozen=True)
class Placer:
    """Knows the meshes and cells of one run, and makes logical tensors of its ranks' entries."""

    cells: Cells
    meshes: dict[tuple[int, str], Mesh]

    def merge(self, kind: Kind, members: Sequence[Member]) -> list[Logical]:
        """Return the logical tensors of one boundary's entries, in order of rank.

        Kinds of a cell give one per cell; the others one per copy that all ranks hold together.
        """
        members = sorted(members, key=lambda m: m.rank)
        try:
            return self._merge(kind, members)
        except LayoutError as error:  # told where it is compared, like any tensor that cannot be
            return [(Merged(tuple(members), (), problem=str(error)), members[0].entry)]

    def _merge(self, kind: Kind, members: Sequence[Member]) -> list[Logical]:
        if kind not in CELL_KINDS or any(self._splits_data(m) for m in members):
            return self._copies(members)
        groups: dict[int, list[Member]] = defaultdict(list)
        for member in members:
            groups[self.cells.cell(member.rank)].append(member)
        return [self._one(group) for group in groups.values()]

    def _splits_data(self, member: Member) -> bool:
        """Tell whether an axis that carries data holds a part of the tensor (a sharded ``.grad``)."""
        shard, mesh = member.entry.shard, self._mesh(member)
        if shard is None or mesh is None:
            return False
        return any(
            p.kind in ("shard", "strided_shard", "flat") and self.cells.carries_data(mesh, axis)
            for axis, p in enumerate(shard.placements)
        )

    def _copies(self, members: Sequence[Member]) -> list[Logical]:
        """Return whole tensors as they are, parts as copies of what they make together."""
        parts = self._place(members, over_data=True)
        if parts is None or all(p.region.whole and not (p.region.flat or p.partial_shape) for p in parts):
            return [(m.source, m.entry) for m in members]
        chosen = [one_copy(parts, number) for number in range(max(copies(parts), 1))]
        odd = odd_shared((m.source, m.entry) for m in members)
        return [_merged(_of(members, part), part, odd) for part in chosen]

    def _one(self, members: Sequence[Member]) -> Logical:
        """Return the tensor that the ranks of one cell hold together."""
        if len(members) == 1 and not members[0].entry.shard:
            return members[0].source, members[0].entry
        parts = self._place(members, over_data=False)
        if parts is None:
            return _unlabelled(members)
        odd = odd_replicas(parts, {m.rank: m.entry.digest for m in members})
        chosen = one_copy(parts)
        if len(chosen) == 1 and parts[0].region.whole and not (parts[0].region.flat or odd):
            return members[0].source, members[0].entry
        ranks = {rank for found in odd for rank in found.ranks}
        ranks.update(odd_shared((m.source, m.entry) for m in members))
        return _merged(members, chosen, tuple(sorted(ranks)))

    def _mesh(self, member: Member) -> Mesh | None:
        shard = member.entry.shard
        return self.meshes.get((member.rank, shard.mesh)) if shard else None

    def _place(self, members: Sequence[Member], *, over_data: bool) -> list[Held] | None:
        """Return where each member lies, None where one has no layout."""
        found = [self._held(member, over_data=over_data) for member in members]
        known = [part for part in found if part is not None]
        return known if len(known) == len(found) else None

    def _held(self, member: Member, *, over_data: bool) -> Held | None:
        """Return where a member lies; unless ``over_data``, along axes that carry data each has its own."""
        shard, mesh = member.entry.shard, self._mesh(member)
        if shard is None or mesh is None:
            return None
        placements = tuple(
            WHOLE if p.kind == "data" or (not over_data and self.cells.carries_data(mesh, axis)) else p
            for axis, p in enumerate(shard.placements)
        )
        return held(member.rank, replace(shard, placements=placements), mesh, member.entry.local_shape)


def _of(members: Sequence[Member], parts: Sequence[Held]) -> list[Member]:
    ranks = {part.rank for part in parts}
    return [member for member in members if member.rank in ranks]


def _unlabelled(members: Sequence[Member]) -> Logical:
    """Return equal tensors as one, different ones as a question."""
    if len({m.entry.digest for m in members}) == 1:
        return members[0].source, members[0].entry
    return Unlabelled(tuple(members)), members[0].entry


def _merged(members: Sequence[Member], parts: Sequence[Held], odd: tuple[int, ...]) -> Logical:
    problems = "; ".join(map(str, check(parts)))
    shape = parts[0].region.global_shape if parts else members[0].entry.local_shape
    merged = Merged(
        tuple(members), tuple(parts), odd, problems or (None if parts else "no rank holds a part")
    )
    return merged, merged_entry(merged, shape)


def merged_entry(merged: Merged, shape: tuple[int, ...]) -> Entry:
    """Return the entry that stands for several: of the whole shape, with a digest over parts and places."""
    digest = xxhash.xxh3_128()
    chosen = {member.rank: member.entry for member in merged.chosen}
    for part in merged.parts:
        place_ = (part.region.dims, part.region.flat, part.partial, chosen[part.rank].digest)
        digest.update(repr(place_).encode())
    disjoint = not any(part.partial_shape for part in merged.parts)
    return replace(
        merged.members[0].entry, local_shape=shape, digest=digest.hexdigest(), shard=None, blob=None,
        same_as=None, sketch=None, stats=_sum([e.stats for e in chosen.values()]) if disjoint else None,
    )  # fmt: skip


def _sum(found: Sequence[Stats | None]) -> Stats | None:
    """Return the statistics of disjoint parts taken together; mean and extremes are left out."""
    known = [stats for stats in found if stats is not None]
    if len(known) < len(found) or any(stats.l2 is None for stats in known):
        return None
    return Stats(
        finite=sum(s.finite for s in known), nan=sum(s.nan for s in known), inf=sum(s.inf for s in known),
        l2=math.sqrt(sum((s.l2 or 0.0) ** 2 for s in known)),
    )  # fmt: skip
