"""The entries of one rank: from its index, or where that is lost from the records in its segments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tensortrace.tracer import layout
from tensortrace.tracer.codec import RECORD_MAGIC, BadFrame
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.manifest import MAX_LINE_BYTES, decode_entry
from tensortrace.tracer.manifest_files import opened
from tensortrace.tracer.reader_segment import Record, SegmentFile, find_segment, open_segment, records
from tensortrace.tracer.types import Entry, Shard, Sketch

OnDamage = Literal["refuse", "salvage"]

_SEGMENT = re.compile(r"seg([0-9]{6}|[1-9][0-9]{6,8})\.safetensors\.zst(?:\.part)?")
_SEARCH_BYTES = 1 << 20


class Loaded(NamedTuple):
    """What was read of a rank: entries in order of their lines, and what is wrong."""

    entries: list[Entry]
    problems: list[str]


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the segments in a rank's folder, in order."""
    matches = (_SEGMENT.fullmatch(name) for name in os.listdir(folder))
    return sorted({int(match[1]) for match in matches if match})


def load(folder: Path, ignorable: tuple[str, ...], on_damage: OnDamage) -> Loaded:
    """Return a rank's entries.

    A torn last line is a problem, not an error. Any other damage raises DamagedTrace; under ``salvage``
    it becomes a problem, and the entries that the segments still hold are added.
    """
    found = _load_index(folder, ignorable, on_damage)
    if found is None:
        found = load_records(folder, ignorable, on_damage)
        found.problems.insert(0, f"{folder}: no index; rebuilt from the segments")
    elif on_damage == "salvage" and found.problems:
        found = _with_missing(found, load_records(folder, ignorable, on_damage))
    return _resolved(found, folder, on_damage)


def _with_missing(index: Loaded, scanned: Loaded) -> Loaded:
    """Add the entries that only the segments hold."""
    known = {entry.event for entry in index.entries}
    more = [entry for entry in scanned.entries if entry.event not in known]
    entries = sorted(index.entries + more, key=lambda entry: entry.event) if more else index.entries
    return Loaded(entries, index.problems + scanned.problems)


def _load_index(folder: Path, ignorable: tuple[str, ...], on_damage: OnDamage) -> Loaded | None:
    """Return what the index holds, finished or not, or None where there is none."""
    final = folder / layout.INDEX
    for path in (final, folder / (layout.INDEX + layout.PART), final):
        try:
            return _parse_lines(path, ignorable, on_damage)
        except FileNotFoundError:
            continue
    return None


def _parse_lines(path: Path, ignorable: tuple[str, ...], on_damage: OnDamage) -> Loaded:
    found = Loaded([], [])
    for offset, line in _lines(path):
        where = f"{path}: offset {offset}"
        if not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
            found.problems.append(f"{where}: the last line is torn ({len(line)} bytes)")
            continue
        try:
            found.entries.append(decode_entry(line, where=where, ignorable=ignorable))
        except DamagedTrace as error:
            _note(found.problems, error, on_damage)
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) with the newline; a line longer than allowed comes cut off, and is the last."""
    offset = 0
    with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield offset, line
            offset += len(line)
            if len(line) > MAX_LINE_BYTES:
                return


def _note(problems: list[str], error: DamagedTrace, on_damage: OnDamage) -> None:
    if on_damage == "refuse":
        raise error
    problems.append(str(error))


def load_records(folder: Path, ignorable: tuple[str, ...], on_damage: OnDamage) -> Loaded:
    """Return the entries whose records the segments hold, in order."""
    found = Loaded([], [])
    for number in segment_numbers(folder):
        path = find_segment(folder, number)
        if path is not None:
            _scan(path, number, found, ignorable, on_damage)
    return found


def _scan(path: Path, number: int, found: Loaded, ignorable: tuple[str, ...], on_damage: OnDamage) -> None:
    with open_segment(path) as segment:
        try:
            for record in records(segment):
                try:
                    found.entries.append(_entry_of(record, path, number, ignorable))
                except DamagedTrace as error:
                    _note(found.problems, error, on_damage)
        except BadFrame as bad:
            torn = bad.torn and path.name.endswith(layout.PART)
            damage = DamagedTrace(f"{path}: offset {bad.offset}: {bad.what}")
            _note(found.problems, damage, "salvage" if torn else on_damage)
            found.entries.extend(_search(segment, bad.offset + 1, number, ignorable))


def _entry_of(record: Record, path: Path, number: int, ignorable: tuple[str, ...]) -> Entry:
    where = f"{path}: offset {record.offset}"
    entry = decode_entry(record.line, where=where, ignorable=ignorable)
    if entry.blob is not None and _extent(entry) != (number, record.data_offset, record.data_length):
        raise DamagedTrace(f"{where}: the record and the tensor before it don't belong together")
    return entry


def _extent(entry: Entry) -> tuple[int, int, int] | None:
    blob = entry.blob
    return (blob.segment, blob.offset, blob.length) if blob is not None else None


def _search(segment: SegmentFile, offset: int, number: int, ignorable: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the entries of whole records behind a damaged place; their checksum tells them."""
    magic = RECORD_MAGIC.to_bytes(4, "little")
    while offset < segment.size:
        window = segment.at(offset, _SEARCH_BYTES)
        inside = window.find(magic)
        if inside < 0:
            offset += max(len(window) - 3, 1)
            continue
        offset += inside
        length = int.from_bytes(segment.at(offset + 4, 4), "little")
        entry = None
        if length <= MAX_LINE_BYTES:
            entry = _maybe_entry(segment.at(offset + 8, length), ignorable)
        if entry is not None and (entry.blob is None or entry.blob.segment == number):
            yield entry
            offset += 8 + length
        else:
            offset += 4


def _maybe_entry(line: bytes, ignorable: tuple[str, ...]) -> Entry | None:
    try:
        return decode_entry(line, where="", ignorable=ignorable)
    except DamagedTrace:
        return None


def _resolved(found: Loaded, folder: Path, on_damage: OnDamage) -> Loaded:
    """Put each shard_ref's shard in its place, check what lines say of each other, order by event."""
    resolver = _Resolver(folder)
    entries: list[Entry] = []
    for entry in found.entries:
        try:
            entries.append(resolver.resolve(entry))
        except DamagedTrace as error:
            _note(found.problems, error, on_damage)
    return Loaded(sorted(entries, key=lambda entry: entry.event), found.problems)


class _Resolver:
    """What the lines so far declared; a line refers to earlier lines only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._events: set[int] = set()
        self._shards: dict[int, Shard] = {}
        self._holders: dict[int, str] = {}
        self._sketches: dict[int, tuple[str, Sketch]] = {}

    def resolve(self, entry: Entry) -> Entry:
        """Return the entry with its own shard; raise DamagedTrace where its references don't hold."""
        where = f"{self._folder}: event {entry.event}"
        if entry.event in self._events:
            raise DamagedTrace(f"{where}: occurs twice")
        if entry.same_as is not None and self._holders.get(entry.same_as) != entry.digest:
            raise DamagedTrace(f"{where}: same_as {entry.same_as} is no earlier tensor with that digest")
        if entry.shard_ref is not None and entry.shard_ref not in self._shards:
            raise DamagedTrace(f"{where}: shard_ref {entry.shard_ref} is no earlier line with a shard")
        self._events.add(entry.event)
        if entry.shard is not None:
            self._shards[entry.event] = entry.shard
        if entry.blob is not None:
            self._holders[entry.event] = entry.digest
        if entry.sketch is not None:
            self._sketches[entry.event] = (entry.digest, entry.sketch)
        if entry.sketch_ref is not None:
            digest, sketch = self._sketches.get(entry.sketch_ref, (None, None))
            if digest != entry.digest:
                what = f"sketch_ref {entry.sketch_ref} is no earlier line with a sketch and that digest"
                raise DamagedTrace(f"{where}: {what}")
            entry = msgspec.structs.replace(entry, sketch=sketch, sketch_ref=None)
        if entry.shard_ref is None:
            return entry
        return msgspec.structs.replace(entry, shard=self._shards[entry.shard_ref], shard_ref=None)
