"""How far each rank has come, read from the folders of a trace that is being written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tensortrace.tracer import layout
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.manifest import MAX_MANIFEST_BYTES, decode_entry
from tensortrace.tracer.manifest_files import opened, read_at, read_capped
from tensortrace.tracer.types import Entry, Kind

TAIL_BYTES = 64 << 10
"""The last index line is looked for in this much of the index's end."""

Key = tuple[int, int | None, Kind, str, str, int]
"""A boundary: step, microbatch, kind, name, slot, call."""


class RankProgress(msgspec.Struct, frozen=True):
    """One rank folder: bytes on disk, bytes of index, and the last boundary (None while there is none).

    ``ended`` is how the rank says it ended, None while it runs or where it was killed. ``pid`` (0 where it is
    not known), ``host`` and ``dropped`` boundaries are its own words as of its last step. ``moved_at`` is
    when it wrote its last index line, in seconds since the epoch.
    """

    folder: str
    rank: int
    attempt: int
    size_bytes: int
    index_bytes: int
    last: Entry | None
    ended: str | None
    pid: int = 0
    host: str = ""
    dropped: int = 0
    moved_at: float = 0.0


class _Dropped(msgspec.Struct, frozen=True):
    count: int = 0


class _Told(msgspec.Struct):
    """The part of ``rank.json`` that says how a rank is; other keys don't matter here."""

    ended: str | None = None
    pid: int = 0
    host: str = ""
    drops: _Dropped = _Dropped()


def look(root: Path) -> tuple[RankProgress, ...]:
    """Return the state of every rank folder, by rank and attempt; damaged files count as not there yet.

    What is read is bounded, however long the trace is. Nothing is waited for: a pipe or a device in the place
    of a file counts as damaged.
    """
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return ()
    found = [(parsed, name) for name in names if (parsed := layout.parse_rank_folder(name))]
    return tuple(_look_at(root / name, rank, attempt) for (rank, attempt), name in sorted(found))


def behind(root: Path, running: Sequence[RankProgress]) -> frozenset[str]:
    """Return the folders of the ranks that the others wait for, as far as their last boundaries tell.

    These are the ranks of the least step; in one step, those that have not come to what another one has left
    behind it. Ranks of a pipeline, which have few boundaries in common, are seldom held against each other.
    """
    steps = {None if rank.last is None else rank.last.step for rank in running}
    if len(steps) > 1:
        least = None if None in steps else min(step for step in steps if step is not None)
        return frozenset(r.folder for r in running if (None if r.last is None else r.last.step) == least)
    passed: set[Key] = set()
    for rank in running:
        entries = [_decoded(line) for line in _last_lines(_index_of(root / rank.folder))]
        passed |= {key_of(entry) for entry in entries[:-1] if entry is not None}
    return frozenset(r.folder for r in running if r.last is not None and key_of(r.last) in passed)


def key_of(entry: Entry) -> Key:
    """Return the key of a boundary, which ranks that run the same program have in common."""
    return (entry.step, entry.microbatch, entry.kind, entry.name, entry.slot, entry.call)


def _look_at(folder: Path, rank: int, attempt: int) -> RankProgress:
    index, told = _index_of(folder), _told(folder / layout.RANK_MANIFEST)
    lines = _last_lines(index)
    index_bytes, moved_at = _size_and_time(index)
    return RankProgress(
        folder=folder.name, rank=rank, attempt=attempt, size_bytes=_bytes_in(folder), index_bytes=index_bytes,
        last=_decoded(lines[-1]) if lines else None, ended=told.ended, pid=told.pid, host=told.host,
        dropped=told.drops.count, moved_at=moved_at,
    )  # fmt: skip


def _index_of(folder: Path) -> Path:
    sealed = folder / layout.INDEX
    return sealed if sealed.exists() else sealed.with_name(sealed.name + layout.PART)


def _bytes_in(folder: Path) -> int:
    try:
        return sum(_size_and_time(path)[0] for path in folder.iterdir())
    except OSError:
        return 0


def _size_and_time(path: Path) -> tuple[int, float]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime


def _last_lines(path: Path) -> list[bytes]:
    """Return the whole lines at the end of an index; the first may lack its beginning."""
    try:
        with opened(path) as descriptor:
            size = os.fstat(descriptor).st_size
            text = read_at(descriptor, max(0, size - TAIL_BYTES), TAIL_BYTES, path)
    except (OSError, TraceError):
        return []
    return [line for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


def _decoded(line: bytes) -> Entry | None:
    try:
        return decode_entry(line, where="")
    except TraceError:
        return None


def _told(path: Path) -> _Told:
    try:
        return msgspec.json.decode(read_capped(path, MAX_MANIFEST_BYTES), type=_Told)
    except (OSError, TraceError, msgspec.DecodeError):
        return _Told()
