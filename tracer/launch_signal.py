"""Hands SIGUSR1, as a trigger of a recording, from ``trace record`` to the ranks that listen for it."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from tensortrace.tracer import layout
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.manifest import read_rank_manifest
from tensortrace.tracer.notices import say

_PROC = Path("/proc")


def signal_ranks(root: Path) -> None:
    """Send SIGUSR1 to every rank of a trace that runs on this machine and handles it; say if there is none.

    Not to what started them: ``torchrun`` would end, and its ranks with it.
    """
    listening = [pid for pid in _pids(root) if _handles(pid)]
    for pid in listening:
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    if not listening:
        say("SIGUSR1: no rank on this machine listens for it (yet)")


def _pids(root: Path) -> list[int]:
    """Return the processes of ranks that have not ended, as their manifests say."""
    found: list[int] = []
    try:
        folders = [path for path in sorted(root.iterdir()) if layout.parse_rank_folder(path.name) is not None]
    except OSError:  # a dry run writes nothing
        return found
    for folder in folders:
        with suppress(OSError, TraceError):
            manifest = read_rank_manifest(folder / layout.RANK_MANIFEST)
            if manifest.host == socket.gethostname() and manifest.ended is None:
                found.append(manifest.pid)
    return found


def _handles(pid: int) -> bool:
    """Tell whether a process has a handler for SIGUSR1; one without would end."""
    with suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, mask = line.partition(":")
            if name == "SigCgt":
                return bool(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1)
    return False
