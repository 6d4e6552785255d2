"""A file that grows by large blocks, which go past the kernel's page cache where that does no harm."""

from __future__ import annotations

import mmap
import os
from errno import EINVAL
from functools import lru_cache
from pathlib import Path

from tensortrace.tracer.writer_files import GrowingFile

BLOCK_BYTES = 4 << 20
"""What is gathered before it is written."""

_PAGE_BYTES = 4096
"""A multiple of every disk's sectors, and of the memory that a direct write may start in."""

_TOGETHER_BYTES = 16 << 10
"""Parts that are less than this together are put together first: to move each takes longer."""

_FILE_SYSTEMS = frozenset(("ext4", "xfs"))
"""Where direct writes are known to do no harm. Elsewhere each may wait for a server."""

_PLAIN_BYTES = 512 << 10
"""What goes into one plain write. The kernel takes pages for a write of megabytes in large pieces, for which
it may have to move others: ten times the time."""

_HELD_BYTES = 32 << 20
"""How much the kernel is left to hold of plain writes before it is asked to let go. A recording would fill
its page cache, push out what the training reads, and take ever new memory for it: under a hypervisor that
hands memory out page by page a write then takes four times the CPU time."""


class BlockFile:
    """A new file ``PATH.part``; ``finish`` gives it its final name. Used by one thread.

    What is added is in the file after ``flush`` for certain, else once a block is full. A direct write costs
    a quarter of the CPU time of a plain one, which copies every byte. No page is written in both ways: what a
    reader has made the kernel hold of a page would not change with a direct write. Raises OSError as
    ``GrowingFile`` does; what a failed write was to write is still to be written then.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._direct = _open_direct(self._file.part)
        self._memory = mmap.mmap(-1, BLOCK_BYTES)
        self._block = memoryview(self._memory)
        self._start = 0  # where in the file the block begins
        self._filled = 0
        self._plain_to = 0  # where the last page that was written plainly ends
        self._let_go_at = _HELD_BYTES

    @property
    def size(self) -> int:
        """Bytes of the file, those that are not written yet included."""
        return self._start + self._filled

    @property
    def written(self) -> int:
        """Bytes that are in the file."""
        return self._file.size

    def add(self, *parts: bytes | bytearray | memoryview) -> None:
        """Append parts, which may change afterwards."""
        if len(parts) > 1 and sum(map(len, parts)) < _TOGETHER_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            rest = memoryview(part)
            while len(rest) >= BLOCK_BYTES - self._filled:
                count = BLOCK_BYTES - self._filled
                self._block[self._filled :] = rest[:count]
                self._filled = BLOCK_BYTES
                self._write_block()
                rest = rest[count:]
            self._block[self._filled : self._filled + len(rest)] = rest
            self._filled += len(rest)

    def flush(self) -> None:
        """Write what was not yet."""
        self._write_plainly(self._filled)

    def rollback(self, size: int) -> None:
        """Forget what lies behind ``size``, written or not."""
        if size < self._start:  # of the block that ``size`` lies in the front is needed again
            start = size - size % _PAGE_BYTES
            front = self._file.read(start, size - start)
            self._file.truncate(size)
            self._block[: len(front)] = front
            self._start = start
        elif size < self._file.size:
            self._file.truncate(size)
        self._filled = size - self._start
        self._plain_to = _whole_pages(self._file.size)

    def overwrite_front(self, data: bytes) -> None:
        """Replace the first bytes, which were written."""
        self._file.overwrite_front(data)

    def finish(self) -> None:
        """Write what was not yet, close the file and give it its final name."""
        self.flush()
        self._close_direct()
        self._file.finish()

    def discard(self) -> None:
        """Close the file and remove it."""
        self._close_direct()
        self._file.discard()

    def close(self) -> None:
        """Close the file as it is and leave it under its ``.part`` name."""
        self._close_direct()
        self._file.close()

    def _write_block(self) -> None:
        """Write the full block and begin the next one."""
        begin = BLOCK_BYTES if self._direct is None else self._plain_to - self._start
        begin = min(max(begin, 0), BLOCK_BYTES)
        self._write_plainly(begin)
        if begin < BLOCK_BYTES:
            self._write_directly(begin)
        self._start, self._filled = self._start + BLOCK_BYTES, 0

    def _write_directly(self, begin: int) -> None:
        """Write the block from ``begin`` on, a multiple of pages."""
        assert self._direct is not None
        try:
            self._file.append(self._block[begin:], through=self._direct)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            self._close_direct()  # the file system takes none, whatever it is called
            self._write_plainly(BLOCK_BYTES)

    def _write_plainly(self, end: int) -> None:
        """Write the block up to ``end``, but for what is in the file already."""
        while (begin := self._file.size - self._start) < end:
            piece = _PLAIN_BYTES - self._file.size % _PLAIN_BYTES
            self._file.append(self._block[begin : min(begin + piece, end)])
        self._plain_to = _whole_pages(self._file.size)
        if self._direct is None and self._file.size >= self._let_go_at:
            self._let_go_at = self._file.size + _HELD_BYTES
            self._file.let_go()

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


def _open_direct(path: Path) -> int | None:
    """Open a file for direct writes too; None where they are not known to be good."""
    flag = getattr(os, "O_DIRECT", 0)  # macOS has none
    if not flag or _file_system(path.stat().st_dev) not in _FILE_SYSTEMS:
        return None
    try:
        return os.open(path, os.O_WRONLY | flag | os.O_CLOEXEC)
    except OSError:
        return None


@lru_cache(maxsize=16)
def _file_system(device: int) -> str | None:
    """Return the type of the file system that lies on a device, as Linux names it; None where it is not told.

    See proc_pid_mountinfo(5): fields up to a hyphen, the third of which is the device, then the type.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                place, _, kind = line.partition(" - ")
                if place.split()[2:3] == [wanted]:
                    return kind.split()[0]
    except (OSError, IndexError):
        return None
    return None
