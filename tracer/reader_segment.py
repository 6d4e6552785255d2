"""Read one segment file: its frames one after another, the records among them, one tensor's bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tensortrace.tracer import layout
from tensortrace.tracer.codec import RECORD_MAGIC, BadFrame, Decoder, Frame, logical, parse_frame
from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.codec_values import digest
from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.manifest import MAX_LINE_BYTES
from tensortrace.tracer.manifest_files import opened, read_at
from tensortrace.tracer.types import Blob, Entry

_WINDOW_BYTES = 64 << 10


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
        self._window = read_at(self._descriptor, offset, _WINDOW_BYTES, self.path)
        self._begin = offset
        return self._window[:size]

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


def read_blob(path: Path, entry: Entry, blob: Blob, limit_bytes: int) -> Bytes:
    """Return the logical bytes of a tensor, whose digest is checked.

    Raises DamagedTrace naming file and offset, and TraceError where the tensor exceeds ``limit_bytes``.
    """
    if blob.raw_length > limit_bytes:
        raise TraceError(
            f"{path}: the tensor of event {entry.event} has {blob.raw_length} bytes",
            expected=f"at most {limit_bytes}",
            remedy="raise limit_bytes to read it",
        )
    with open_segment(path) as segment:
        frames = blob_frames(segment, blob)
        raw = np.empty(blob.raw_length, np.uint8)
        decoder, filled = Decoder(), 0
        for frame in frames:
            part = decoder.frame(segment.at(frame.offset, frame.length), frame)
            raw[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            filled += len(part)
    data = logical(blob.codec, entry.dtype, raw)
    found = digest(entry.dtype, entry.local_shape, data)
    if found != entry.digest:
        raise DamagedTrace(
            f"{path}: offset {blob.offset}: the tensor of event {entry.event} has another digest",
            found=found,
            expected=entry.digest,
        )
    return data
