"""Holds copied boundaries in bounded memory until one background thread has written them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tensortrace.tracer.copies import Wait, copy_bytes, host_memory
from tensortrace.tracer.ring import Ring
from tensortrace.tracer.settings import Pressure
from tensortrace.tracer.types import Boundary

WAKE_BYTES = 1 << 20
LINGER_S = 0.05
"""The writer is woken for this much, and looks for less this often: a wake-up for every small tensor
would hand the interpreter lock to and fro, which costs training more than the copy."""

GIVE_UP_S = 60.0
"""At the end of a program we wait for the writer as long as it gets something done in this time."""


class Store(Protocol):
    """Where boundaries go; used by one thread at a time, the writer thread once that has started.

    ``append`` must not keep a reference to ``payload`` (uint8), whose memory is reused after it returns.
    """

    def append(self, boundary: Boundary, payload: NDArray[np.uint8]) -> object:
        """Store one boundary."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Host memory lent to one boundary; ``offset`` is None for memory outside the ring."""

    offset: int | None
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Copied:
    """A boundary whose bytes are in host memory once ``wait`` has returned."""

    boundary: Boundary
    lease: Lease
    wait: Wait | None


_Job = _Copied | Callable[[], None]


class Stage:
    """A queue of at most ``capacity`` bytes, with the thread that empties it into a store.

    ``lend``, ``put`` and ``run_in_order`` may be called from several training threads.
    ``on_error`` and ``on_end`` are called on the writer thread: on the first failure of the store, and
    last of all. A tensor larger than the whole buffer is admitted alone, when the queue is empty.
    """

    def __init__(
        self,
        store: Store,
        *,
        capacity: int,
        pressure: Pressure,
        on_error: Callable[[BaseException], None],
        on_end: Callable[[], None],
    ) -> None:
        self._store = store
        self._pressure = pressure
        self._on_error = on_error
        self._on_end = on_end
        self._ring = Ring(capacity)
        self._memory: torch.Tensor | None = None
        self._oversized = False
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken = False
        self._written = 0
        self._unseen_bytes = 0
        self._thread = threading.Thread(target=self._run, name="tensortrace-writer", daemon=True)
        self._thread.start()

    def lend(self, tensor: torch.Tensor) -> Lease | None:
        """Return memory for this tensor's bytes; None where there is none under the pressure policy.

        Under ``block`` this waits for the writer, and returns None only once the stage is closing.
        """
        size = tensor.numel() * tensor.element_size()
        with self._changed:
            while not (self._closing or self._broken):
                if (lease := self._try_lend(size, tensor)) is not None:
                    return lease
                if self._pressure == "drop":
                    return None
                self._changed.notify_all()
                self._changed.wait()
        return None

    def put(self, tensor: torch.Tensor, lease: Lease) -> Callable[[Boundary], None]:
        """Copy the tensor into its memory and return the function that queues its boundary.

        The two are apart because a boundary gets its event number, under the caller's lock, only once its
        bytes are safe.
        """
        size = lease.memory.numel()
        try:
            wait = copy_bytes(tensor, lease.memory)
        except BaseException:
            self._give_back(lease)
            raise
        return lambda boundary: self._push(_Copied(boundary, lease, wait), size)

    def run_in_order(self, job: Callable[[], None]) -> None:
        """Call ``job`` on the writer thread, after all that is queued already."""
        self._push(job)

    def close(self) -> bool:
        """Wait until everything queued is written and the thread has ended; True where it has.

        Waits as long as the writer makes progress. Call it on any thread but the writer's.
        """
        self.shut()
        while self._thread.is_alive():
            before = self._written
            self._thread.join(GIVE_UP_S)
            if self._thread.is_alive() and self._written == before:
                return False
        return True

    def shut(self) -> None:
        """Refuse further boundaries and let the thread end once it has written the queue; don't wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def is_writer(self, thread: threading.Thread) -> bool:
        """Tell whether this is the writer thread."""
        return thread is self._thread

    def _try_lend(self, size: int, tensor: torch.Tensor) -> Lease | None:
        if size > self._ring.capacity:
            if self._oversized or not self._ring.empty:
                return None
            self._oversized = True
            return Lease(None, host_memory(size, like=tensor))
        offset = self._ring.reserve(size)
        if offset is None:
            return None
        if self._memory is None:
            self._memory = host_memory(self._ring.capacity, like=tensor)
        return Lease(offset, self._memory[offset : offset + size])

    def _give_back(self, lease: Lease) -> None:
        with self._changed:
            if lease.offset is None:
                self._oversized = False
            else:
                self._ring.release(lease.offset)
            self._changed.notify_all()

    def _push(self, job: _Job, size_bytes: int = 0) -> None:
        with self._changed:
            self._queue.append(job)
            self._unseen_bytes += size_bytes
            if self._unseen_bytes >= WAKE_BYTES:
                self._unseen_bytes = 0
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
                self._written += 1
        except BaseException as error:
            self._broken = True
            self._on_error(error)
        finally:
            self._discard_queue()
            self._on_end()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait(LINGER_S)
            return self._queue.popleft() if self._queue else None

    def _do(self, job: _Job) -> None:
        if not isinstance(job, _Copied):
            job()
            return
        try:
            if job.wait is not None:
                job.wait()
            self._store.append(job.boundary, job.lease.memory.numpy())
        finally:
            self._give_back(job.lease)

    def _discard_queue(self) -> None:
        """Wake whoever waits for memory: after a failure nothing more is written."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
