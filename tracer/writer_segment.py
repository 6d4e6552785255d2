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
        self._pending = memoryview(bytearray(_WRITE_BYTES))
        self._pending_bytes = 0
        try:
            self._file.append(skippable_frame(FILLER_MAGIC, bytes(reserved_bytes - 8)))
        except OSError:
            self._file.discard()
            raise
        self.boundaries = 0

    @property
    def size(self) -> int:
        """Bytes in the segment, those not written yet included: where the next frame will lie."""
        return self._file.size + self._pending_bytes

    def put(self, frames: Iterable[Parts]) -> None:
        """Append the frames of one tensor; nothing of them is needed any more on return."""
        for frame in frames:
            for part in frame:
                self._gather(memoryview(part))

    def commit(self, line: bytes) -> None:
        """Append a boundary's index line as its record; everything is written when this returns."""
        self._gather(memoryview(skippable_frame(RECORD_MAGIC, line)))
        self._flush()
        self.boundaries += 1

    def rollback(self, size: int) -> None:
        """Forget what lies behind ``size``, which a failed write may have left."""
        self._pending_bytes = 0
        self._file.truncate(size)

    def _gather(self, part: memoryview) -> None:
        """Take in some bytes, and write what has been gathered up to each multiple of a write's size."""
        while part:
            room = _WRITE_BYTES - self.size % _WRITE_BYTES
            taken, part = part[:room], part[room:]
            self._pending[self._pending_bytes : self._pending_bytes + len(taken)] = taken
            self._pending_bytes += len(taken)
            if len(taken) == room:
                self._flush()

    def _flush(self) -> None:
        data, self._pending_bytes = self._pending[: self._pending_bytes], 0
        self._file.append(data)

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
