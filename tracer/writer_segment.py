"""One segment while it is written: a Zstandard stream whose front is reserved for its header."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensortrace.tracer import layout
from tensortrace.tracer.codec import FILLER_MAGIC, RECORD_MAGIC, Parts, skippable_frame
from tensortrace.tracer.writer_files import GrowingFile
from tensortrace.tracer.writer_header import Header

_WRITE_BYTES = 512 << 10
"""What goes into one write. The kernel takes pages for a write of megabytes in large pieces, for which it may
have to move others: ten times the time."""

_HELD_BYTES = 32 << 20
"""How much the kernel is left to hold before it is asked to let go. A recording would fill its page cache,
push out what the training reads, and take ever new memory for it: under a hypervisor that hands memory out
page by page a write then takes four times the CPU time."""

_GATHER_BYTES = 64 << 10
"""Frames are copied together up to here, to save writes; of longer ones the bytes are written from where
they are."""


class SegmentWriter:
    """Appends tensors to ``segNNNNNN.safetensors.zst.part``; ``seal`` turns it into its final form.

    A boundary is ``put`` frame by frame and then ``commit``-ted with its index line, or ``rollback``-ed.
    Used by one thread.
    """

    def __init__(self, folder: Path, rank: int, number: int, reserved_bytes: int) -> None:
        self.number = number
        self.header = Header(rank, number, reserved_bytes)
        self._reserved = reserved_bytes
        self._file = GrowingFile(folder / layout.segment_name(number))
        self._pending = bytearray()
        self._let_go_at = _HELD_BYTES
        try:
            self._file.append(skippable_frame(FILLER_MAGIC, bytes(reserved_bytes - 8)))
        except OSError:
            self._file.discard()
            raise
        self.boundaries = 0

    @property
    def size(self) -> int:
        """Bytes in the segment, those not written yet included: where the next frame will lie."""
        return self._file.size + len(self._pending)

    def put(self, frames: Iterable[Parts]) -> None:
        """Append the frames of one tensor; nothing of them is needed any more on return."""
        for frame in frames:
            self._gather(frame)

    def commit(self, line: bytes) -> None:
        """Append a boundary's index line as its record; everything is written when this returns."""
        self._gather((skippable_frame(RECORD_MAGIC, line),))
        self._flush()
        self.boundaries += 1

    def rollback(self, size: int) -> None:
        """Forget what lies behind ``size``, which a failed write may have left."""
        self._pending = bytearray()
        self._file.truncate(size)

    def _gather(self, frame: Parts) -> None:
        """Take in a frame, whose parts may not outlast this call."""
        if len(self._pending) + sum(map(len, frame)) <= _GATHER_BYTES:
            for part in frame:
                self._pending += part
        else:
            self._flush(frame)

    def _flush(self, frame: Parts = ()) -> None:
        """Write what was gathered and a frame, up to each multiple of a write's size."""
        parts: list[memoryview] = []
        room = _WRITE_BYTES - self._file.size % _WRITE_BYTES
        for part in (memoryview(self._pending), *(memoryview(part) for part in frame)):
            while len(part) >= room:
                self._file.append(*parts, part[:room])
                part, room, parts = part[room:], _WRITE_BYTES, []
            parts.append(part)
            room -= len(part)
        self._file.append(*parts)
        self._pending = bytearray()
        if self._file.size >= self._let_go_at:
            self._let_go_at = self._file.size + _HELD_BYTES
            self._file.let_go()

    def seal(self) -> None:
        """Write the header over the reserved front and give the file its final name; once."""
        header = self.header.frames()
        filler = self._reserved - len(header) - 8
        assert filler >= 0, "has_room() keeps the header within the reserved front"
        self._file.overwrite_front(header + skippable_frame(FILLER_MAGIC, bytes(filler)))
        self._file.finish()

    def discard(self) -> None:
        """Remove a segment that holds nothing."""
        self._file.discard()

    def close(self) -> None:
        """Close the file as it is, unsealed."""
        self._file.close()
