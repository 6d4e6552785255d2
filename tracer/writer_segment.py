"""One segment while it is written: a Zstandard stream whose front is reserved for its header."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensortrace.tracer import layout
from tensortrace.tracer.codec import FILLER_MAGIC, RECORD_MAGIC, Parts, skippable_frame
from tensortrace.tracer.writer_blocks import BlockFile
from tensortrace.tracer.writer_header import Header


class SegmentWriter:
    """Appends tensors to ``segNNNNNN.safetensors.zst.part``; ``seal`` turns it into its final form.

    A boundary is ``put`` frame by frame and then ``commit``-ted with its index line, or ``rollback``-ed.
    What lies before ``written`` is in the file, after a ``flush`` all is. What was not ``keep``-ed is what
    ``lose`` takes back. Used by one thread.
    """

    def __init__(self, folder: Path, rank: int, number: int, reserved_bytes: int) -> None:
        self.number = number
        self.header = Header(rank, number, reserved_bytes)
        self.boundaries = 0
        self._reserved = reserved_bytes
        self._file = BlockFile(folder / layout.segment_name(number))
        try:
            self._file.add(skippable_frame(FILLER_MAGIC, bytes(reserved_bytes - 8)))
            self._file.flush()
        except OSError:
            self._file.discard()
            raise
        self._kept = self._file.size
        self._kept_boundaries = 0

    @property
    def size(self) -> int:
        """Bytes in the segment, those not written yet included: where the next frame will lie."""
        return self._file.size

    @property
    def written(self) -> int:
        """Bytes that are in the file."""
        return self._file.written

    def put(self, frames: Iterable[Parts]) -> None:
        """Append the frames of one tensor; nothing of them is needed any more on return."""
        for frame in frames:
            self._file.add(*frame)

    def commit(self, line: bytes) -> None:
        """Append a boundary's index line as its record."""
        self._file.add(skippable_frame(RECORD_MAGIC, line))
        self.boundaries += 1

    def flush(self) -> None:
        """Write what is not in the file yet."""
        self._file.flush()

    def keep(self, size: int, boundaries: int) -> None:
        """Take note that so many further boundaries, up to ``size``, are finished."""
        self._kept = size
        self._kept_boundaries += boundaries

    def lose(self) -> None:
        """Take back what is not finished. The header names it, so that such a segment stays unsealed."""
        self.rollback(self._kept)
        self.boundaries = self._kept_boundaries

    def rollback(self, size: int) -> None:
        """Forget what lies behind ``size``, which a failed write may have left."""
        if size < self._file.size:
            self._file.rollback(size)

    def seal(self) -> None:
        """Write the header over the reserved front and give the file its final name; once."""
        if self.header.boundaries != self.boundaries:
            return
        header = self.header.frames()
        filler = self._reserved - len(header) - 8
        assert filler >= 0, "has_room() keeps the header within the reserved front"
        self._file.flush()
        self._file.overwrite_front(header + skippable_frame(FILLER_MAGIC, bytes(filler)))
        self._file.finish()

    def discard(self) -> None:
        """Remove a segment that holds nothing."""
        self._file.discard()

    def close(self) -> None:
        """Close the file as it is, unsealed."""
        self._file.close()
