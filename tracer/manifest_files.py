"""Open the files of a trace for reading: regular files only, never more bytes than allowed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensortrace.tracer.errors import DamagedTrace, TraceError


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a file descriptor for reading.

    Raises FileNotFoundError where there is no file, DamagedTrace where it is no regular file (a pipe
    would block for ever, a device never end), TraceError where it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamagedTrace(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_capped(path: Path, most: int) -> bytes:
    """Return a file's bytes; raise DamagedTrace if it has more than ``most``."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise DamagedTrace(f"{path}: {size} bytes", expected=f"at most {most}")
        return read_at(descriptor, 0, size, path)


def read_at(descriptor: int, offset: int, size: int, path: Path) -> bytes:
    """Return up to ``size`` bytes from ``offset``; fewer only at the end of the file."""
    parts: list[bytes] = []
    while size > 0:
        try:
            part = os.pread(descriptor, size, offset)
        except OSError as error:
            raise TraceError(f"{path}: offset {offset}: cannot be read: {error.strerror}") from error
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
