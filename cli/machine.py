"""How a process that does nothing but compare uses its machine: memory stays, arithmetic has one thread.

For the command line alone: in a process of others these are not ours to choose.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
"""Parameters of glibc's ``mallopt`` (malloc.h)."""

_KEPT_BYTES = 1 << 30

_ours: set[str] = set()


def settle() -> None:
    """Keep memory that was freed, and let linear algebra use one thread; call before numpy is imported.

    By default glibc gives large arrays back to the system, and every new one costs page faults, which take
    longer than what is computed with it.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if name not in os.environ:
            os.environ[name] = "1"
            _ours.add(name)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_MAX, 0)
            mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
            mallopt(_TOP_PAD, 16 << 20)


def given_environ() -> dict[str, str]:
    """Return the environment without what ``settle`` put there, for a program that has its own settings."""
    return {name: value for name, value in os.environ.items() if name not in _ours}


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
