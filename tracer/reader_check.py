"""Check one rank's files through and through: every byte of every segment belongs to something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tensortrace.tracer import layout
from tensortrace.tracer.codec import FILLER_MAGIC, BadFrame, Decoder, Frame
from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.manifest import decode_entry
from tensortrace.tracer.manifest_json import BadJson, parse_object
from tensortrace.tracer.manifest_safetensors import MAX_HEADER_BYTES, TensorItem, tensor_item, unique_name
from tensortrace.tracer.reader_index import segment_numbers
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.reader_segment import SegmentFile, find_segment, open_segment, records
from tensortrace.tracer.reader_window import first_kept
from tensortrace.tracer.types import Entry


def check_rank(rank: RankTrace) -> Iterator[str]:
    """Yield what is wrong with a rank's tensors and segments, beyond ``rank.problems``."""
    for entry in rank.entries:
        if entry.blob is not None and rank.stored(entry):  # what is lost, ``rank.problems`` counts by segment
            try:
                rank.read_bytes(entry, checksums=True)
            except TraceError as error:
                yield str(error)
    for number in segment_numbers(rank.folder):
        path = find_segment(rank.folder, number)
        if path is not None:
            yield from _check_segment(path, number, rank)


def check_copies(rank: RankTrace) -> Iterator[str]:
    """Yield how many tensors a rank left to others that no rank stored: their copies are not equal."""
    if rank.copies is None:
        return
    lost = [entry for entry in rank.entries if rank.copies.left(entry) and not rank.stored(entry)]
    if lost:
        first = lost[0]
        where = f"event {first.event}, {first.kind.value} {first.name} {first.slot} of step {first.step}"
        yield (
            f"{rank.folder}: {len(lost)} tensors were left to the first rank with a copy (--dedup-replicas), "
            f"and no rank that is there has the same, so their bytes are not stored; the first is {where}"
        )


def torn_ends(rank: RankTrace) -> Iterator[str]:
    """Yield which of a rank's segments end too early though every tensor in them is whole.

    Only what stands behind a segment's last tensor is looked at, so that this costs a few reads.
    """
    last: dict[int, int] = {}
    for entry in rank.entries:
        if entry.blob is not None:
            end = entry.blob.offset + entry.blob.length
            last[entry.blob.segment] = max(last.get(entry.blob.segment, 0), end)
    for number, end in sorted(last.items()):
        path = find_segment(rank.folder, number)
        if path is None or path.name.endswith(layout.PART):
            continue  # lost, or broken off: told otherwise
        try:
            with open_segment(path) as segment:
                if segment.size >= end and not any(True for _ in list(records(segment, end))):
                    yield f"{path}: offset {end}: the record of the last tensor is missing"
        except TraceError as error:
            yield str(error)


def _check_segment(path: Path, number: int, rank: RankTrace) -> Iterator[str]:
    try:
        with open_segment(path) as segment:
            front, offset = _front(segment)
            found = list(_records(segment, offset, rank.manifest.ignorable if rank.manifest else ()))
            if not path.name.endswith(layout.PART):
                _check_header(_header(segment, front), found, path)
    except TraceError as error:
        yield str(error)
        return
    known = {entry.event: entry for entry in rank.entries}
    first = first_kept(rank.manifest)
    used = any(entry.blob and entry.blob.segment == number for entry in rank.entries)
    dropped = bool(found) and all(entry.step < first for entry in found)
    if not used and not dropped and not any(entry.event in known for entry in found):
        yield f"{path}: no entry refers to this segment"
    for entry in found:
        kept = entry.step >= first or entry.event in known
        if kept and not _same(entry, known.get(entry.event)):
            yield f"{path}: the record of event {entry.event} is not in the index, or differs from it"


def _same(record: Entry, entry: Entry | None) -> bool:
    """Tell whether a record is an entry's line; the entry has shard and sketch in place of references."""
    if entry is None:
        return False
    if record.shard_ref is not None and entry.shard is not None:
        record = replace(record, shard=entry.shard, shard_ref=None)
    if record.sketch_ref is not None and entry.sketch is not None:
        record = replace(record, sketch=entry.sketch, sketch_ref=None)
    return record == entry


def _front(segment: SegmentFile) -> tuple[list[Frame], int]:
    """Return the frames before the first filler, and where the filler ends."""
    frames: list[Frame] = []
    offset = 0
    while (frame := segment.frame(offset)).skippable is None:
        frames.append(frame)
        offset += frame.length
        if sum(each.content for each in frames) > MAX_HEADER_BYTES:
            raise BadFrame(frame.offset, f"a header of more than {MAX_HEADER_BYTES} bytes")
    if frame.skippable != FILLER_MAGIC or any(segment.at(frame.start, frame.content)):
        raise BadFrame(frame.offset, "the reserved front does not end in zeros")
    return frames, offset + frame.length


def _records(segment: SegmentFile, offset: int, ignorable: tuple[str, ...]) -> Iterator[Entry]:
    """Yield each record's entry; every frame must be a record or belong to the one behind it."""
    data = offset
    for record in records(segment, offset):
        where = f"{segment.path}: offset {record.offset}"
        entry = decode_entry(record.line, where=where, ignorable=ignorable)
        blob = entry.blob
        held = (blob.offset, blob.length) if blob is not None else (data, 0)
        if held != (data, record.offset - data):
            raise BadFrame(record.offset, "the record and the tensor before it don't belong together")
        data = record.offset + 8 + len(record.line)
        yield entry
    if data < segment.size:
        raise BadFrame(data, "bytes that no record names", torn=True)


def _header(segment: SegmentFile, front: list[Frame]) -> bytes:
    """Return the JSON of a sealed segment's safetensors header."""
    decoder = Decoder()
    raw = b"".join(decoder.frame(segment.at(frame.offset, frame.length), frame) for frame in front)
    if len(raw) < 8 or int.from_bytes(raw[:8], "little") != len(raw) - 8:
        raise BadFrame(0, "the safetensors header is missing or of another length")
    return raw[8:]


def _check_header(text: bytes, entries: list[Entry], path: Path) -> None:
    """Raise DamagedTrace unless a header names exactly the tensors of the records."""
    try:
        found = parse_object(text)
        metadata = found.pop("__metadata__", None)
        items = msgspec.convert(found, dict[str, TensorItem])
    except (BadJson, msgspec.ValidationError) as error:
        raise DamagedTrace(f"{path}: safetensors header: {error}") from error
    expected: dict[str, TensorItem] = {}
    taken: set[str] = set()
    end = 0
    for entry in entries:
        name = unique_name(entry, taken)
        if entry.blob is not None:
            expected[name] = tensor_item(entry, entry.blob.codec, end)
            end = expected[name].data_offsets[1]
    if items != expected:
        odd = next((name for name in (*items, *expected) if items.get(name) != expected.get(name)), "")
        raise DamagedTrace(f"{path}: safetensors header: {odd[:200]!r} is not what its record says")
    if not isinstance(metadata, dict) or not taken <= set(metadata):
        raise DamagedTrace(f"{path}: safetensors header: __metadata__ lacks a boundary")
