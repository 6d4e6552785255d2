"""Read one segment file: its frames one after another, the records among them, one tensor's bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensortrace.tracer import layout
from tensortrace.tracer.codec import (
    BLOCK_BYTES,
    RECORD_MAGIC,
    BadFrame,
    Decoder,
    Frame,
    Stored,
    logical,
    parse_frame,
    stored_contents,
    stored_heads,
    stored_length,
)
from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.codec_values import digest
from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.manifest import MAX_LINE_BYTES
from tensortrace.tracer.manifest_files import opened, read_at
from tensortrace.tracer.reader_memory import take
from tensortrace.tracer.types import Blob, Entry

_WINDOW_BYTES = 64 << 10
_STEP_BYTES = 512
_MOST_PARTS = 512


class _Decoders(threading.local):
    def __init__(self) -> None:
        self.one = Decoder()


_decoders = _Decoders()


class SegmentFile:
    """An open segment; reads through a small window, so that walking headers costs few system calls."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._window = b""
        self._begin = 0

    def at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``; fewer only at the end of the file."""
        inside = offset - self._begin
        if 0 <= inside and inside + size <= len(self._window):
            return self._window[inside : inside + size]
        if size > _WINDOW_BYTES // 2:
            return read_at(self._descriptor, offset, size, self.path)
        jumped = inside > len(self._window) + _STEP_BYTES  # from block to block of a large tensor
        window = _STEP_BYTES if jumped and size <= _STEP_BYTES else _WINDOW_BYTES
        self._window = read_at(self._descriptor, offset, window, self.path)
        self._begin = offset
        return self._window[:size]

    def into(self, offset: int, parts: Sequence[memoryview]) -> bool:
        """Fill arrays, one after the other, with the bytes from ``offset``; False where there are too few."""
        for start in range(0, len(parts), _MOST_PARTS):
            some = parts[start : start + _MOST_PARTS]
            size = sum(part.nbytes for part in some)
            try:
                read = os.preadv(self._descriptor, some, offset)
            except OSError as error:
                raise TraceError(f"{self.path}: offset {offset}: cannot be read: {error.strerror}") from error
            if read != size:
                return False
            offset += size
        return True

    def frame(self, offset: int) -> Frame:
        """Return the frame at an offset, which lies wholly inside the file; else raise BadFrame."""
        frame = parse_frame(self, offset)
        if offset + frame.length > self.size:
            raise BadFrame(offset, "the file ends inside a frame", torn=True)
        return frame


class Record(NamedTuple):
    """An index line found in a segment, and the range of data frames that stand before it."""

    line: bytes
    offset: int
    data_offset: int
    data_length: int


def find_segment(folder: Path, number: int) -> Path | None:
    """Return the path of a segment, sealed or still open, or None.

    The sealed name is tried again at the end: a writer may seal it while we look.
    """
    sealed = folder / layout.segment_name(number)
    part = sealed.with_name(sealed.name + layout.PART)
    return next((path for path in (sealed, part, sealed) if os.path.lexists(path)), None)


@contextmanager
def open_segment(path: Path) -> Iterator[SegmentFile]:
    """Open a segment for reading; DamagedTrace where it is missing or no regular file."""
    try:
        with opened(path) as descriptor:
            yield SegmentFile(path, descriptor)
    except FileNotFoundError as error:
        raise DamagedTrace(f"{path}: the segment is missing") from error
    except BadFrame as bad:
        raise DamagedTrace(f"{path}: offset {bad.offset}: {bad.what}") from bad


def records(segment: SegmentFile, offset: int = 0) -> Iterator[Record]:
    """Yield the records from a frame's offset on; raise BadFrame where the frames end or break off.

    Other skippable frames are stepped over.
    """
    data = offset
    while offset < segment.size:
        frame = segment.frame(offset)
        offset += frame.length
        if frame.skippable is None:
            continue
        if frame.skippable == RECORD_MAGIC:
            if frame.content > MAX_LINE_BYTES:
                raise BadFrame(frame.offset, f"a record of {frame.content} bytes")
            line = segment.at(frame.start, frame.content)
            yield Record(line, frame.offset, data, frame.offset - data)
        data = offset


def blob_frames(segment: SegmentFile, blob: Blob) -> list[Frame]:
    """Return the frames of a blob, whose stated sizes add up to what the index says.

    Nothing is decompressed or allocated before that holds. Raises BadFrame.
    """
    end = blob.offset + blob.length
    if end > segment.size:
        raise BadFrame(segment.size, f"the file ends before the tensor at {blob.offset} does, at {end}")
    frames: list[Frame] = []
    offset, raw = blob.offset, 0
    while offset < end:
        frame = segment.frame(offset)
        if frame.skippable is not None:
            raise BadFrame(offset, "a skippable frame stands inside a tensor")
        offset += frame.length
        raw += frame.content
        frames.append(frame)
    if offset != end or raw != blob.raw_length:
        text = f"frames of {offset - blob.offset} bytes hold {raw}, the index says {blob.length}"
        raise BadFrame(blob.offset, f"{text} bytes hold {blob.raw_length}")
    return frames


def stored_into(segment: SegmentFile, frame: Frame, out: Bytes, first: int = 0) -> bool:
    """Read whole blocks of a frame of raw blocks as they stand in the file, from the ``first`` on.

    False where it is no such frame. Its checksum is not looked at: that is for who checks the tensor's
    digest.
    """
    blocks = max(-(-frame.content // BLOCK_BYTES), 1)
    plain = frame.start - frame.offset + frame.content + 3 * blocks
    if frame.length not in (plain, plain + 4):  # with a checksum
        return False
    stop = first + max(-(-out.size // BLOCK_BYTES), 1)
    headers = bytearray(3 * (stop - first))
    of_headers, parts = memoryview(headers), list[memoryview]()
    for number in range(stop - first):
        parts += [
            of_headers[3 * number : 3 * number + 3],
            out[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES].data,
        ]
    if not segment.into(frame.start + first * (BLOCK_BYTES + 3), parts):
        return False
    sizes = [part.nbytes for part in parts[1::2]]
    expected = [
        (size << 3 | (number == blocks - 1)).to_bytes(3, "little") for number, size in enumerate(sizes, first)
    ]
    return headers == b"".join(expected)


def stored_at(segment: SegmentFile, blob: Blob) -> Stored | None:
    """Return what the frames of a blob hold by its lengths, if our writer stored it, else None."""
    if blob.offset + blob.length > segment.size:
        return None
    return stored_contents(blob.raw_length, blob.length)


def stored_blob(segment: SegmentFile, blob: Blob) -> Bytes | None:
    """Return the raw bytes of a blob that stands in the file as our writer stores it; None where it does not.

    Every header is what it should be, so that the frames need not be walked before. Checksums are not looked
    at: the tensor's digest, which is for the caller to check, says what these would.
    """
    stored = stored_at(segment, blob)
    if stored is None:
        return None
    raw = take(blob.raw_length)
    offset, filled = blob.offset, 0
    for content in stored.contents:
        head, blocks = stored_heads(content, checksums=stored.checksums)
        found, headers = bytearray(len(head)), bytearray(3 * len(blocks))
        parts, of_headers = [memoryview(found)], memoryview(headers)
        for number in range(len(blocks)):
            start = filled + number * BLOCK_BYTES
            stop = min(start + BLOCK_BYTES, filled + content)
            parts += [of_headers[3 * number : 3 * number + 3], raw[start:stop].data]
        if not segment.into(offset, parts) or found != head or headers != b"".join(blocks):
            return None
        offset += stored_length(content, checksums=stored.checksums)
        filled += content
    return raw


def _walked(segment: SegmentFile, blob: Blob, *, checksums: bool) -> Bytes:
    """Return the raw bytes of a blob, frame by frame."""
    frames = blob_frames(segment, blob)
    raw = take(blob.raw_length)
    filled = 0
    for frame in frames:
        out = raw[filled : filled + frame.content]
        filled += frame.content
        if checksums or not stored_into(segment, frame, out):
            part = _decoders.one.frame(segment.at(frame.offset, frame.length), frame)
            out[:] = np.frombuffer(part, np.uint8)
    return raw


def read_blob(path: Path, entry: Entry, blob: Blob, limit_bytes: int, *, checksums: bool = False) -> Bytes:
    """Return the logical bytes of a tensor, whose digest is checked; the frames' ``checksums`` if asked.

    Raises DamagedTrace naming file and offset, and TraceError where the tensor exceeds ``limit_bytes``.
    """
    if blob.raw_length > limit_bytes:
        raise TraceError(
            f"{path}: the tensor of event {entry.event} has {blob.raw_length} bytes",
            expected=f"at most {limit_bytes}",
            remedy="raise limit_bytes to read it",
        )
    with open_segment(path) as segment:
        found = None if checksums else stored_blob(segment, blob)
        raw = found if found is not None else _walked(segment, blob, checksums=checksums)
    data = logical(blob.codec, entry.dtype, raw, take)
    hashed = digest(entry.dtype, entry.local_shape, data)
    if hashed != entry.digest:
        raise DamagedTrace(
            f"{path}: offset {blob.offset}: the tensor of event {entry.event} has another digest",
            found=hashed,
            expected=entry.digest,
        )
    return data
