"""Processes of a validation that was killed: what they still write must not get into the next trace."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.settings import VARIABLE, decode

_PROC = Path("/proc")
GRACE_S = 10.0
"""How long a process has from SIGTERM to its end."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder; raise BadRequest where another validation that still runs does.

    Whatever else then records in it was left over.
    """
    try:
        import fcntl  # not on Windows
    except ImportError:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadRequest(
                f"-o {folder}: another validation is running there", remedy="wait for it, or choose another"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(held)


def end(trace: Path) -> int:
    """End the processes of this user that record at ``trace``; return how many there were."""
    found = _recording_at(trace)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _recording_at(trace):
            with suppress(OSError):
                os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while _recording_at(trace) and time.monotonic() < until:
            time.sleep(0.1)
    return len(found)


def _recording_at(trace: Path) -> list[int]:
    """Return the processes whose environment has them record there: launchers and what they started."""
    mark, found = f"{VARIABLE}=".encode(), []
    for path in _PROC.glob("[0-9]*/environ"):
        with suppress(OSError, TraceError, ValueError):
            words = path.read_bytes().split(b"\0")  # none of a process that ended and of other users'
            text = next((word[len(mark) :] for word in words if word.startswith(mark)), None)
            if text is not None and decode(text.decode()).root == str(trace):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]
