"""How far each rank has come, read from the folders of a trace that is being written."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tensortrace.tracer import layout
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.manifest import decode_entry
from tensortrace.tracer.types import Entry

TAIL_BYTES = 64 << 10
"""The last index line is looked for in this much of the index's end."""


class RankProgress(msgspec.Struct, frozen=True):
    """One rank folder: bytes on disk, bytes of index, and the last boundary (None while there is none).

    ``ended`` is how the rank says it ended, None while it runs or where it was killed.
    """

    folder: str
    rank: int
    attempt: int
    size_bytes: int
    index_bytes: int
    last: Entry | None
    ended: str | None


class _Ending(msgspec.Struct):
    ended: str | None = None


def look(root: Path) -> tuple[RankProgress, ...]:
    """Return the state of every rank folder, by rank and attempt; damaged files count as not there yet."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return ()
    found = [(parsed, name) for name in names if (parsed := layout.parse_rank_folder(name))]
    return tuple(_look_at(root / name, rank, attempt) for (rank, attempt), name in sorted(found))


def _look_at(folder: Path, rank: int, attempt: int) -> RankProgress:
    sealed = folder / layout.INDEX
    index = sealed if sealed.exists() else sealed.with_name(sealed.name + layout.PART)
    return RankProgress(
        folder=folder.name,
        rank=rank,
        attempt=attempt,
        size_bytes=sum(_size(path) for path in folder.iterdir()),
        index_bytes=_size(index),
        last=_last_entry(index),
        ended=_ended(folder / layout.RANK_MANIFEST),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _last_entry(path: Path) -> Entry | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        return decode_entry(lines[-1], where=str(path)) if lines else None
    except (OSError, TraceError):
        return None


def _ended(path: Path) -> str | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Ending).ended
    except (OSError, msgspec.DecodeError):
        return None
