"""Read any range of a stored tensor's elements, in memory that does not grow with the tensor."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from pathlib import Path

import numpy as np
import zstandard

from tensortrace.tracer.codec import (
    BLOCK_BYTES,
    FRAME_BYTES,
    WINDOW_BYTES,
    BadFrame,
    Decoder,
    Frame,
    interleaved,
    stored_heads,
    stored_length,
)
from tensortrace.tracer.codec_dtypes import Bytes, dtype_of
from tensortrace.tracer.codec_values import digest_of
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.reader_memory import take
from tensortrace.tracer.reader_segment import SegmentFile, blob_frames, open_segment, stored_at, stored_into
from tensortrace.tracer.types import Blob, Entry

CURSORS = 256
"""Frames that stay open in the middle, of all tensors together: neighbouring ranges go on from there."""

_READ_BYTES = 64 << 10


class _Source:
    """The compressed bytes of one frame, as a file that is open only while it is read."""

    def __init__(self, path: Path, frame: Frame) -> None:
        self._path = path
        self._at = frame.offset
        self._end = frame.offset + frame.length

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        with open_segment(self._path) as segment:
            found = segment.at(self._at, min(size, self._end - self._at))
        self._at += len(found)
        return found


class _Cursor:
    """A place in a compressed frame, from which reading goes on."""

    def __init__(self, path: Path, frame: Frame) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
        self._stream = decompressor.stream_reader(
            _Source(path, frame),  # type: ignore[arg-type]  # only read is used
            read_size=_READ_BYTES,
        )
        self._frame = frame
        self.position = 0

    def read(self, start: int, stop: int) -> Bytes:
        """Return raw bytes from the position or behind it; raise BadFrame if they aren't there."""
        while self.position < start:
            self._take(min(start - self.position, BLOCK_BYTES))
        return np.frombuffer(self._take(stop - start), np.uint8)

    def _take(self, size: int) -> bytes:
        try:
            found: bytes = self._stream.read(size)
        except zstandard.ZstdError as error:
            raise BadFrame(self._frame.offset, f"the frame does not decompress ({error})") from error
        if len(found) != size:
            raise BadFrame(self._frame.offset, "the frame holds fewer raw bytes than it states")
        self.position += size
        return found


class _Cursors:
    """The cursors last used, by reader and frame; one that is in use is taken out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[tuple[int, int], _Cursor] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: tuple[int, int], start: int) -> _Cursor | None:
        """Return a cursor that has not passed ``start``."""
        with self._lock:
            found = self._waiting.pop(key, None)
        return found if found is not None and found.position <= start else None

    def put(self, key: tuple[int, int], cursor: _Cursor) -> None:
        """Keep a cursor, letting go of those not used for longest."""
        with self._lock:
            self._waiting[key] = cursor
            while len(self._waiting) > self._most:
                self._waiting.popitem(last=False)


_CURSORS = _Cursors(CURSORS)
_NUMBERS = count()


class RangeReader:
    """The elements of one stored tensor by ranges.

    Construction reads the frames' headers, and the first range checks the digest of the whole tensor in one
    pass, so that no element is returned unchecked. May be used on several threads.
    """

    def __init__(self, path: Path, entry: Entry, blob: Blob) -> None:
        """Raise DamagedTrace, naming file and offset, where the frames are not what the index says."""
        self._entry = entry
        self._blob = blob
        self._number = next(_NUMBERS)
        self._checked = False
        self._item = dtype_of(entry.dtype).itemsize
        self.size = blob.raw_length // self._item
        with open_segment(path) as segment:
            self._frames = _stored_frames(segment, blob) or blob_frames(segment, blob)
        self._ends = list(accumulate(frame.content for frame in self._frames))

    def through(self, path: Path, stops: Sequence[int]) -> Iterator[Bytes]:
        """Yield the logical bytes of all elements, in ranges that end at ``stops``.

        The digest is checked along the way, unless it was before: nothing that was made of the tensor may be
        used before the last step, which raises DamagedTrace where the digest is another. The file is open
        from the first step to the last. Else as ``read``.
        """
        hasher = None if self._checked else digest_of(self._entry.dtype, self._entry.local_shape)
        start, decoder = 0, Decoder()
        with open_segment(path) as segment:
            for stop in stops:
                found = self._logical(segment, decoder, start, stop)
                if hasher is not None:
                    hasher.update(found.data)
                yield found
                start = stop
        if hasher is not None:
            self._compare(path, hasher.hexdigest())

    def read(self, path: Path, start: int, stop: int) -> Bytes:
        """Return the logical bytes of elements [start, stop) from the segment, which may have been sealed.

        Raises DamagedTrace naming file and offset, ValueError for elements that the tensor doesn't have.
        """
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"elements [{start}, {stop}) of {self.size}")
        with open_segment(path) as segment:
            decoder = Decoder()
            if not self._checked:
                self._check(segment, decoder)
            return self._logical(segment, decoder, start, stop)

    def _check(self, segment: SegmentFile, decoder: Decoder) -> None:
        hasher = digest_of(self._entry.dtype, self._entry.local_shape)
        step = FRAME_BYTES if self._blob.codec == "planes" else FRAME_BYTES // self._item
        for start in range(0, self.size, step):  # whole frames as our writer cuts them
            hasher.update(self._logical(segment, decoder, start, min(start + step, self.size)).data)
        self._compare(segment.path, hasher.hexdigest())

    def _compare(self, path: Path, found: str) -> None:
        if found != self._entry.digest:
            raise DamagedTrace(
                f"{path}: offset {self._blob.offset}: the tensor of event {self._entry.event} "
                "has another digest",
                found=found,
                expected=self._entry.digest,
            )
        self._checked = True

    def _logical(self, segment: SegmentFile, decoder: Decoder, start: int, stop: int) -> Bytes:
        item = self._item
        if self._blob.codec == "raw" or item == 1:
            return self._raw(segment, decoder, start * item, stop * item)
        firsts = range(0, item * self.size, self.size)
        planes = [self._raw(segment, decoder, first + start, first + stop) for first in firsts]
        return interleaved(planes, take)

    def _raw(self, segment: SegmentFile, decoder: Decoder, start: int, stop: int) -> Bytes:
        """Return the raw bytes [start, stop) of the blob."""
        out = take(stop - start)
        number = bisect_right(self._ends, start)
        while start < stop:
            first = self._ends[number] - self._frames[number].content
            upto = min(stop, self._ends[number])
            filled = out.size - (stop - start)
            part = out[filled : filled + upto - start]
            frame, low, high = self._frames[number], start - first, upto - first
            blocks = low % BLOCK_BYTES == 0 and (high == frame.content or high % BLOCK_BYTES == 0)
            if not (blocks and stored_into(segment, frame, part, low // BLOCK_BYTES)):
                part[:] = self._part(segment, decoder, number, low, high)
            start, number = upto, number + 1
        return out

    def _part(self, segment: SegmentFile, decoder: Decoder, number: int, low: int, high: int) -> Bytes:
        """Return the raw bytes [low, high) of one frame."""
        frame = self._frames[number]
        if (low, high) == (0, frame.content):
            whole = decoder.frame(segment.at(frame.offset, frame.length), frame)
            return np.frombuffer(whole, np.uint8)
        stored = _stored(segment, frame, low, high)
        if stored is not None:
            return stored
        key = (self._number, number)
        cursor = _CURSORS.take(key, low) or _Cursor(segment.path, frame)
        found = cursor.read(low, high)
        if cursor.position < frame.content:
            _CURSORS.put(key, cursor)
        return found


def _stored_frames(segment: SegmentFile, blob: Blob) -> list[Frame] | None:
    """Return the frames of a blob that our writer stored raw, from their headers alone; None of any other.

    What stands between the headers is looked at when it is read.
    """
    stored = stored_at(segment, blob)
    if stored is None:
        return None
    frames = []
    offset = blob.offset
    for content in stored.contents:
        head, _ = stored_heads(content, checksums=stored.checksums)
        if segment.at(offset, len(head)) != head:
            return None
        length = stored_length(content, checksums=stored.checksums)
        frames.append(Frame(offset, length, content, offset + len(head), None))
        offset += length
    return frames


def _stored(segment: SegmentFile, frame: Frame, low: int, high: int) -> Bytes | None:
    """Return the raw bytes [low, high) of a frame of raw blocks as they stand in the file; else None."""
    blocks = -(-frame.content // BLOCK_BYTES)
    plain = frame.start - frame.offset + frame.content + 3 * blocks
    if frame.length not in (plain, plain + 4):  # with a checksum
        return None
    first, last = low // BLOCK_BYTES, (high - 1) // BLOCK_BYTES
    end = min((last + 1) * BLOCK_BYTES, frame.content)
    size = end - first * BLOCK_BYTES + 3 * (last - first + 1)
    data = np.frombuffer(segment.at(frame.start + first * (BLOCK_BYTES + 3), size), np.uint8)
    out = np.empty(end - first * BLOCK_BYTES, np.uint8)
    for block in range(last - first + 1):
        begin = block * BLOCK_BYTES
        length = min(BLOCK_BYTES, out.size - begin)
        header = int.from_bytes(data[begin + 3 * block : begin + 3 * block + 3].tobytes(), "little")
        if header != (length << 3 | (first + block == blocks - 1)):
            return None  # not a raw block of this length, or not the last one where it should be
        out[begin : begin + length] = data[begin + 3 * block + 3 :][:length]
    return out[low - first * BLOCK_BYTES : high - first * BLOCK_BYTES]
