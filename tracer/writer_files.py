"""One file that only grows, written with plain writes, under its ``.part`` name until it is finished."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tensortrace.tracer import layout

_COPY_BYTES = 1 << 20


class GrowingFile:
    """A new file ``PATH.part``; ``finish`` gives it its final name. Used by one thread.

    Raises OSError where the file exists already or the disk is full; what was written before stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.part = path.with_name(path.name + layout.PART)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.part, flags, 0o644)
        self.size = 0

    @property
    def closed(self) -> bool:
        """Tell whether the file was closed, finished or not."""
        return self._descriptor < 0

    def append(self, *parts: bytes | memoryview, through: int | None = None) -> None:
        """Write at the end, in one go, maybe through another descriptor of the file.

        On failure nothing of it remains in the file.
        """
        try:
            size = write_all(self._descriptor if through is None else through, parts, self.size)
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += size

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes that were written."""
        return os.pread(self._descriptor, size, offset)

    def let_go(self) -> None:
        """Ask the kernel to write out what it holds of the file, and not to hold what it has written out."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            with suppress(OSError):  # it is only advice, which a file system need not take
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def overwrite_front(self, data: bytes) -> None:
        """Replace the first bytes."""
        write_all(self._descriptor, (data,), 0)

    def truncate(self, size: int) -> None:
        """Cut the file back to an earlier size."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def drop_front(self, size: int) -> None:
        """Remove the first bytes: the others are copied, and the copy takes the file's place at once."""
        copy = self.part.with_name(self.part.name + layout.PART)
        descriptor = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for offset in range(size, self.size, _COPY_BYTES):
                part = os.pread(self._descriptor, min(_COPY_BYTES, self.size - offset), offset)
                write_all(descriptor, (part,), offset - size)
            os.replace(copy, self.part)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self.size -= size

    def finish(self) -> None:
        """Close the file and give it its final name."""
        self.close()
        os.rename(self.part, self.path)

    def discard(self) -> None:
        """Close the file and remove it."""
        self.close()
        os.unlink(self.part)

    def close(self) -> None:
        """Close the file and leave it under its ``.part`` name."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_all(descriptor: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
    """Write some parts (few enough for one call) one behind the other; return how many bytes they are."""
    total = sum(map(len, parts))
    written = 0
    if len(parts) > 1 and hasattr(os, "pwritev"):  # macOS has it from 11 on
        written = os.pwritev(descriptor, parts, offset)
    if written < total:  # a single part, or what a call interrupted by a full disk has left of several
        rest = memoryview(b"".join(parts) if len(parts) > 1 else parts[0])[written:]
        while rest:
            count = os.pwrite(descriptor, rest, offset + written)
            rest, written = rest[count:], written + count
    return total
