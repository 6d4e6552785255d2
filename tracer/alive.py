"""Tells whether the process that a trace names still runs on this machine."""

from __future__ import annotations

import os


def is_alive(pid: int) -> bool:
    """Tell whether there is a process of this number; one that waits to be collected (a zombie) is none."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read(512).rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False  # not on Linux, or gone meanwhile
