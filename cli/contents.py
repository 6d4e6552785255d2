"""What is in a trace, summed up: ranks, steps, kinds, sizes, how it ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.reader_window import common, first_kept, span
from tensortrace.tracer.replicas import is_spare
from tensortrace.tracer.types import INIT_STEP, Drops, Entry, Environment, Kind, Promise, Window

SCHEMA = "tensortrace.show/1"


class Shown(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records that ``trace show`` writes as JSON; ``docs/json.md`` describes them."""

    def to_json(self) -> bytes:
        """Return the record as JSON, UTF-8; numbers that are not finite are null."""
        return msgspec.json.encode(self)


class Sizes(Shown, frozen=True):
    """Boundaries and bytes: ``raw_bytes`` as the program held them, ``stored_bytes`` as files hold them.

    Of ``sketches`` boundaries a sketch was kept in place of bytes, of ``statistics`` nothing but those; of
    ``copies`` the bytes were left to another rank.
    """

    boundaries: int
    raw_bytes: int
    stored_bytes: int
    sketches: int = 0
    statistics: int = 0
    copies: int = 0


class KindRow(Shown, frozen=True):
    """One kind over all ranks and steps."""

    kind: Kind
    names: int
    sizes: Sizes


class RankRow(Shown, frozen=True):
    """One rank; ``ended`` is None where it did not finish, ``device`` where its manifest is missing."""

    rank: int
    attempt: int
    host: str | None
    device: str | None
    steps: int
    microbatches: int
    sizes: Sizes
    ended: str | None
    drops: Drops
    window: Window | None = None


class Absent(Shown, frozen=True):
    """A rung that these ranks declare they cannot have."""

    kind: str
    reason: str
    ranks: tuple[int, ...]


class Run(Shown, frozen=True):
    """What the launcher wrote: None in what it did not live to write."""

    run_id: str
    command: tuple[str, ...]
    started_at: float
    seconds: float | None
    exit_code: int | None


class Contents(Shown, frozen=True, kw_only=True):
    """A whole trace. ``steps`` are those recorded, without ``init``; ``microbatches`` the most in a step.

    ``common`` is None where ranks keep all their steps, else the first and last that all ranks have.
    """

    path: str
    run: Run | None
    world_size: int
    ranks: tuple[RankRow, ...]
    steps: tuple[int, ...]
    init: bool
    microbatches: int
    kinds: tuple[KindRow, ...]
    total: Sizes
    absent: tuple[Absent, ...]
    promise: Promise
    environment: Environment
    problems: tuple[str, ...]
    common: tuple[int, ...] | None = None


def contents_of(trace: Trace) -> Contents:
    """Sum up an open trace, from its indexes alone: no tensor is read."""
    entries = [(rank, entry) for rank in trace.ranks for entry in rank.entries]
    steps = {entry.step for rank, entry in entries if entry.step >= first_kept(rank.manifest)}
    left = any(rank.copies is not None for rank in trace.ranks)
    manifests = [rank.manifest for rank in trace.ranks if rank.manifest]
    return Contents(
        path=str(trace.path),
        run=_run(trace),
        world_size=max([manifest.world_size for manifest in manifests] or [len(trace.ranks)]),
        ranks=tuple(_rank_row(rank) for rank in trace.ranks),
        steps=tuple(sorted(steps - {INIT_STEP})),
        init=INIT_STEP in steps,
        microbatches=_microbatches(entry for _, entry in entries),
        kinds=_kinds((entry for _, entry in entries), left=left),
        total=sizes_of((entry for _, entry in entries), left=left),
        absent=_absent(trace.ranks),
        promise=next((each.promise for each in (trace.manifest, *manifests) if each), Promise()),
        environment=_environment(trace),
        problems=trace.problems,
        common=_common(trace),
    )


def _common(trace: Trace) -> tuple[int, ...] | None:
    """Return the first and the last step that all ranks kept, () for none, of ranks that dropped others."""
    if not any(rank.manifest and rank.manifest.window for rank in trace.ranks):
        return None
    first, last = common([span(rank.manifest, rank.entries) for rank in trace.ranks])
    return (max(first, 0), last) if first <= last else ()


def sizes_of(entries: Iterable[Entry], *, left: bool) -> Sizes:
    """Add up entries; bytes that an earlier entry already holds are stored once and count once.

    ``left`` tells whether ranks left copies to each other.
    """
    boundaries = raw = stored = sketches = statistics = copies = 0
    for entry in entries:
        boundaries += 1
        raw += size_bytes(entry.dtype, entry.local_shape)
        stored += entry.blob.length if entry.blob else 0
        bare = entry.blob is None and entry.same_as is None
        sketches += bare and entry.sketch is not None
        copied = left and bare and entry.sketch is None and is_spare(entry)
        copies += copied
        statistics += bare and entry.sketch is None and not copied
    return Sizes(boundaries, raw, stored, sketches, statistics, copies)


def _kinds(entries: Iterable[Entry], *, left: bool) -> tuple[KindRow, ...]:
    of_kind: dict[Kind, list[Entry]] = defaultdict(list)
    for entry in entries:
        of_kind[entry.kind].append(entry)
    return tuple(
        KindRow(kind, len({entry.name for entry in of_kind[kind]}), sizes_of(of_kind[kind], left=left))
        for kind in Kind
        if kind in of_kind
    )


def _rank_row(rank: RankTrace) -> RankRow:
    manifest = rank.manifest
    return RankRow(
        rank=rank.rank,
        attempt=rank.attempt,
        host=manifest.host if manifest else None,
        device=manifest.device if manifest else None,
        steps=len({e.step for e in rank.entries if e.step >= first_kept(manifest)} - {INIT_STEP}),
        microbatches=_microbatches(rank.entries),
        sizes=sizes_of(rank.entries, left=rank.copies is not None),
        ended=manifest.ended if manifest else None,
        drops=manifest.drops if manifest else Drops(),
        window=manifest.window if manifest else None,
    )


def _microbatches(entries: Iterable[Entry]) -> int:
    return max((entry.microbatch + 1 for entry in entries if entry.microbatch is not None), default=0)


def _absent(ranks: Iterable[RankTrace]) -> tuple[Absent, ...]:
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in ranks:
        for kind, reason in (rank.manifest.absent if rank.manifest else {}).items():
            found[kind, reason].append(rank.rank)
    return tuple(Absent(kind, reason, tuple(who)) for (kind, reason), who in found.items())


def _run(trace: Trace) -> Run | None:
    manifest = trace.manifest
    if manifest is None:
        return None
    seconds = None if manifest.ended_at is None else manifest.ended_at - manifest.started_at
    return Run(manifest.run_id, manifest.command, manifest.started_at, seconds, manifest.exit_code)


def _environment(trace: Trace) -> Environment:
    """Return the launcher's environment, with the versions and flags that only the first rank knows."""
    first = next((rank.manifest.environment for rank in trace.ranks if rank.manifest), Environment())
    if trace.manifest is None:
        return first
    launcher = trace.manifest.environment
    return msgspec.structs.replace(
        launcher,
        versions=launcher.versions | first.versions,
        flags=launcher.flags | first.flags,
        variables=launcher.variables | first.variables,
    )
