"""Read any range of a stored tensor's elements, in memory that does not grow with the tensor."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path

import numpy as np

from tensortrace.tracer.codec import FRAME_BYTES, Decoder
from tensortrace.tracer.codec_dtypes import Bytes, dtype_of
from tensortrace.tracer.codec_values import digest_of
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.reader_segment import SegmentFile, blob_frames, open_segment
from tensortrace.tracer.types import Blob, Entry

CACHE_BYTES = 128 << 20
"""Decompressed frames that are kept, of all tensors together: neighbouring ranges share them."""


class _Cache:
    """The frames last used, by reader and number; shared by all threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> bytes | None:
        """Return a frame that is still there."""
        with self._lock:
            found = self._frames.get(key)
            if found is not None:
                self._frames.move_to_end(key)
            return found

    def put(self, key: tuple[int, int], frame: bytes) -> None:
        """Keep a frame, letting go of those not used for longest."""
        with self._lock:
            if key not in self._frames:
                self._held += len(frame)
            self._frames[key] = frame
            while self._held > self._most:
                self._held -= len(self._frames.popitem(last=False)[1])

    def forget(self, reader: int) -> None:
        """Let go of one reader's frames."""
        with self._lock:
            for key in [key for key in self._frames if key[0] == reader]:
                self._held -= len(self._frames.pop(key))


_CACHE = _Cache(CACHE_BYTES)
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
            self._frames = blob_frames(segment, blob)
        self._ends = list(accumulate(frame.content for frame in self._frames))

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

    def close(self) -> None:
        """Let go of what is kept of the tensor; it can still be read."""
        _CACHE.forget(self._number)

    def _check(self, segment: SegmentFile, decoder: Decoder) -> None:
        hasher = digest_of(self._entry.dtype, self._entry.local_shape)
        step = FRAME_BYTES if self._blob.codec == "planes" else FRAME_BYTES // self._item
        for start in range(0, self.size, step):  # whole frames as our writer cuts them
            hasher.update(self._logical(segment, decoder, start, min(start + step, self.size)).data)
        found = hasher.hexdigest()
        if found != self._entry.digest:
            raise DamagedTrace(
                f"{segment.path}: offset {self._blob.offset}: the tensor of event {self._entry.event} "
                "has another digest",
                found=found,
                expected=self._entry.digest,
            )
        self._checked = True

    def _logical(self, segment: SegmentFile, decoder: Decoder, start: int, stop: int) -> Bytes:
        item = self._item
        if self._blob.codec == "raw" or item == 1:
            return self._raw(segment, decoder, start * item, stop * item)
        out = np.empty((stop - start, item), np.uint8)
        for byte in range(item):
            first = byte * self.size
            out[:, byte] = self._raw(segment, decoder, first + start, first + stop)
        return out.reshape(-1)

    def _raw(self, segment: SegmentFile, decoder: Decoder, start: int, stop: int) -> Bytes:
        """Return the raw bytes [start, stop) of the blob."""
        out = np.empty(stop - start, np.uint8)
        for number, first, frame in self._overlapping(segment, decoder, start, stop):
            low, high = max(start, first), min(stop, self._ends[number])
            out[low - start : high - start] = np.frombuffer(frame, np.uint8)[low - first : high - first]
        return out

    def _overlapping(
        self, segment: SegmentFile, decoder: Decoder, start: int, stop: int
    ) -> Iterator[tuple[int, int, bytes]]:
        """Yield number, first raw byte and content of the frames that reach into a range."""
        number = bisect_right(self._ends, start)
        while (
            number < len(self._frames) and (first := self._ends[number] - self._frames[number].content) < stop
        ):
            yield number, first, self._frame(segment, decoder, number)
            number += 1

    def _frame(self, segment: SegmentFile, decoder: Decoder, number: int) -> bytes:
        key = (self._number, number)
        found = _CACHE.get(key)
        if found is None:
            frame = self._frames[number]
            found = decoder.frame(segment.at(frame.offset, frame.length), frame)
            _CACHE.put(key, found)
        return found
