"""Memory that tensors are read into, used again: fresh memory costs page faults, as much as reading does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tensortrace.tracer.codec_dtypes import Bytes

KEPT_BYTES = 128 << 20
"""Bytes that wait for the next tensor, at most."""

_LEAST_BYTES = 256 << 10
"""Smaller memory the allocator has at hand."""


def take(size: int) -> Bytes:
    """Return that many bytes, of any content; they are used again once no array refers to them.

    May be called on several threads.
    """
    return np.empty(size, np.uint8) if size < _LEAST_BYTES else np.asarray(_Lent(size, _waiting))[:size]


class _Waiting:
    """Memory that nothing refers to, by size; who holds the lock may take it again, by freeing some."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self._bytes = 0
        self._lock = threading.RLock()

    def take(self, size: int) -> Bytes:
        with self._lock:
            found = self._free.get(size)
            if not found:
                return np.empty(size, np.uint8)
            self._bytes -= size
            return found.pop()

    def put(self, memory: Bytes) -> None:
        with self._lock:
            if memory.size > KEPT_BYTES:
                return
            self._bytes += memory.size
            self._free.setdefault(memory.size, []).append(memory)
            while self._bytes > KEPT_BYTES:  # what waits for longest goes first, whatever its size
                size = next(iter(self._free))
                self._bytes -= size * bool(self._free[size])
                del self._free[size][:1]
                if not self._free[size]:
                    del self._free[size]


_waiting = _Waiting()


class _Lent:
    """Memory as the base of an array; when the last array on it is gone it waits to be used again."""

    def __init__(self, size: int, waiting: _Waiting) -> None:
        grain = 1 << max(size.bit_length() - 4, 0)  # tensors of nearly one size share memory
        self._waiting = waiting
        self._memory = waiting.take(-(-size // grain) * grain)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """What numpy asks for to make an array of it, which refers to this object."""
        return self._memory.__array_interface__

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)  # there was none to be had
        if memory is not None:
            self._waiting.put(memory)
