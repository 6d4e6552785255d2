"""Holds copied boundaries in bounded memory until one background thread has written them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128

from tensortrace.tracer.codec_values import digest_of
from tensortrace.tracer.copies import (
    Wait,
    bytes_of_plain,
    copy_bytes,
    copy_plain,
    dtype_name,
    host_memory,
    is_plain,
)
from tensortrace.tracer.keeping import Summary
from tensortrace.tracer.latest import Latest
from tensortrace.tracer.room import Room
from tensortrace.tracer.settings import Pressure
from tensortrace.tracer.types import Boundary, Mesh

WAKE_BYTES = 4 << 20
LINGER_S = 0.05
"""The writer is woken for this much, and looks for less this often: a wake-up for every small tensor
would hand the interpreter lock to and fro, which costs training more than the copy."""

MOST_MET = 1 << 12
"""Tensors of which it is remembered that they were here."""

MOST_PREFIXES = 1 << 12
"""Combinations of dtype and shape whose digests' beginnings are kept."""

MOST_QUEUED = 1 << 14
"""Boundaries that may wait, however small: a record of one takes a KiB beside its bytes, with a sketch 3."""

HURRIED = 0.25
"""The share of the buffer in use from which on the store is asked to be quick rather than thorough.

It is asked to be quick also with tensors of a training on the CPU, whose cores are the ones we would use.
"""

GIVE_UP_S = 60.0
"""At the end of a program we wait for the writer as long as it gets something done in this time."""


class Store(Protocol):
    """Where boundaries go; used by one thread at a time, the writer thread once that has started.

    ``append`` must not keep a reference to ``payload`` (uint8), whose memory is reused after it returns.
    """

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> object:
        """Store one boundary; ``hurried`` asks for speed rather than size."""


@runtime_checkable
class Remembering(Store, Protocol):
    """A store that knows its latest contents by their digests.

    After ``append_known`` with a payload its content is known for the next ``remembers`` calls of either
    method at least, as it is after one without: these have the bytes of a known content. It is known for
    boundaries that are ``held`` alike. The digest is that of an index line; where ``remembers`` is 0 no
    content is known.
    """

    @property
    def remembers(self) -> int:
        """For how many further boundaries a content is known."""

    def held(self, boundary: Boundary) -> str:
        """Name how a boundary is held, in full or not; may be called on any thread."""

    def sums(self, boundary: Boundary) -> bool:
        """Tell whether a summary may be kept of a boundary in place of its bytes; on any thread."""

    def look(self, boundary: Boundary, data: NDArray[np.uint8]) -> None:
        """Take note of bytes that are in host memory by now; on any thread, before those that follow."""

    def summary(self, boundary: Boundary, data: NDArray[np.uint8]) -> Summary | None:
        """Return what is kept in place of these bytes, None where they are; on any thread, after ``held``."""

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Take note of the meshes that shards refer to, before a boundary does; on any thread."""

    def append_known(
        self, boundary: Boundary, digest: str, payload: NDArray[np.uint8] | None, *, hurried: bool = False,
        held: str = "", summary: Summary | None = None,
    ) -> object:  # fmt: skip
        """Store one boundary with this digest: its bytes are ``payload``, or a summary is all that is kept.

        Without either its content must be known, ``held`` alike.
        """


class Lease(NamedTuple):
    """Host memory lent to one boundary: these ``bytes`` of ``whole``, at this address.

    ``offset`` is None for memory outside the room, all of ``whole``.
    """

    offset: int | None
    whole: torch.Tensor
    bytes: NDArray[np.uint8]
    address: int

    @property
    def memory(self) -> torch.Tensor:
        """The bytes as a tensor (uint8), which takes longer to make than a small copy."""
        if self.offset is None:
            return self.whole
        return self.whole[self.offset : self.offset + self.bytes.size]


class _Copied(NamedTuple):
    """A boundary whose bytes are in host memory once ``wait`` has returned; their digest, if it is known."""

    boundary: Boundary
    lease: Lease
    wait: Wait | None
    digest: str | None


class _Bare(NamedTuple):
    """A boundary without its bytes: the store knows them, or they were summed up."""

    boundary: Boundary
    digest: str
    held: str
    summary: Summary | None = None


_Job = _Copied | _Bare | Callable[[], None]


class Stage:
    """A queue of at most ``capacity`` bytes, with the thread that empties it into a store.

    ``bare``, ``lend``, ``put`` and ``run_in_order`` may be called from several training threads.
    ``on_error`` and ``on_end`` are called on the writer thread: on the first failure of the store, and
    last of all. A tensor larger than the whole buffer is admitted alone, when the queue is empty.

    With a store that remembers, a copy on the host is hashed while it is warm: of a content that the store
    knows nothing is kept here and nothing done again. Nothing but the bytes tells: neither address nor
    version of a tensor changes with all that may be written to it. They only say what is likely: a tensor
    that was here before is hashed where it lies, and copied if its content is new after all.
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
        self._remembering = store if isinstance(store, Remembering) and store.remembers else None
        self._latest = Latest(self._remembering.remembers if self._remembering else 0)
        self._pressure = pressure
        self._on_error = on_error
        self._on_end = on_end
        self._room = Room(capacity)
        self._memory: torch.Tensor | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._address = 0
        self._met: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._prefixes: dict[tuple[torch.dtype, torch.Size], xxh3_128] = {}
        self._oversized = False
        self._queue: deque[_Job] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the writer waits for it
        self._freed = threading.Condition(self._lock)  # and training threads for this
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
        size = tensor.nbytes
        with self._lock:
            while not (self._closing or self._broken):
                if (lease := self._try_lend(size, tensor)) is not None:
                    return lease
                if self._pressure == "drop":
                    return None
                self._changed.notify_all()
                self._freed.wait()
        return None

    def put(self, tensor: torch.Tensor, lease: Lease, boundary: Boundary) -> Callable[[Boundary], None]:
        """Copy the tensor into its memory and return the function that queues its boundary.

        The two are apart because a boundary gets its event number, under the caller's lock, only once its
        bytes are safe; ``boundary`` is that without a number. Where a summary is all that is kept, the memory
        is free again.
        """
        wait = None
        try:
            if is_plain(tensor):
                copy_plain(tensor, lease.address, tensor.nbytes)
            else:
                wait = copy_bytes(tensor, lease.memory)
            found = self._digest(tensor, lease.bytes.data) if wait is None and self._remembering else None
            bare = None
            if found is not None and self._remembering is not None:
                self._remembering.look(boundary, lease.bytes)
                if self._remembering.sums(boundary):
                    bare = self._without_bytes(boundary, found, lease.bytes)
        except BaseException:
            self._give_back(lease)
            raise
        if bare is not None:
            self._give_back(lease)
            return bare
        return lambda boundary: self._push_boundary(_Copied(boundary, lease, wait, found))

    def bare(self, tensor: torch.Tensor, boundary: Boundary) -> Callable[[Boundary], None] | None:
        """Return the function that queues the boundary of a tensor which needs no copy, else None.

        The store knows its content, or keeps a summary only, which is made here and now. Of what is kept in
        full only a tensor that was here before is looked at. ``boundary`` needs no number yet.
        """
        if self._remembering is None or not is_plain(tensor):
            return None
        if not self._remembering.sums(boundary) and not self._was_here(tensor):
            return None
        view = bytes_of_plain(tensor)
        digest = self._digest(tensor, view)
        data = np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
        return self._without_bytes(boundary, digest, data)

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Tell the store of the meshes that shards refer to."""
        if self._remembering is not None:
            self._remembering.know(meshes)

    def _was_here(self, tensor: torch.Tensor) -> bool:
        if tensor.is_inference():
            return False
        seen, version = self._met.get(id(tensor)), tensor._version
        if seen is not None and seen[0]() is tensor and seen[1] == version:
            return True
        if len(self._met) >= MOST_MET:
            self._met.clear()
        self._met[id(tensor)] = weakref.ref(tensor), version
        return False

    def _without_bytes(
        self, boundary: Boundary, digest: str, data: NDArray[np.uint8]
    ) -> Callable[[Boundary], None] | None:
        """Return the function that queues a boundary without these bytes; None where they are needed."""
        assert self._remembering is not None
        held = self._remembering.held(boundary)
        key = digest + held
        with self._lock:
            if self._closing or self._broken or len(self._queue) >= MOST_QUEUED:
                return None
            known = self._latest.holds(key)
        summary = None
        if not known and (summary := self._remembering.summary(boundary, data)) is None:
            return None
        return lambda numbered: self._push_bare(_Bare(numbered, digest, held, summary), key)

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
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            self._freed.notify_all()

    def is_writer(self, thread: threading.Thread) -> bool:
        """Tell whether this is the writer thread."""
        return thread is self._thread

    def _digest(self, tensor: torch.Tensor, data: memoryview) -> str:
        """Return the digest of these bytes as those of a tensor like this; what goes before them is kept."""
        key = tensor.dtype, tensor.shape
        prefix = self._prefixes.get(key)
        if prefix is None:
            if len(self._prefixes) >= MOST_PREFIXES:
                self._prefixes.clear()
            prefix = self._prefixes[key] = digest_of(dtype_name(tensor.dtype), tuple(tensor.shape))
        hasher = prefix.copy()
        hasher.update(data)
        return hasher.hexdigest()

    def _try_lend(self, size: int, tensor: torch.Tensor) -> Lease | None:
        if len(self._queue) >= MOST_QUEUED:
            return None
        if size > self._room.capacity:
            if self._oversized or not self._room.empty:
                return None
            self._oversized = True
            memory = host_memory(size, like=tensor)
            return Lease(None, memory, memory.numpy(), memory.data_ptr())
        offset = self._room.reserve(size)
        if offset is None:
            return None
        if self._memory is None:
            self._memory = host_memory(self._room.capacity, like=tensor)
            self._bytes, self._address = self._memory.numpy(), self._memory.data_ptr()
        return Lease(offset, self._memory, self._bytes[offset : offset + size], self._address + offset)

    def _give_back(self, lease: Lease) -> None:
        with self._lock:
            if lease.offset is None:
                self._oversized = False
            else:
                self._room.release(lease.offset)
            self._freed.notify_all()

    def _push_boundary(self, job: _Copied) -> None:
        """Queue a boundary, without its bytes where the store will know them by then."""
        with self._lock:
            if job.digest is None or self._remembering is None:
                self._push(job, job.lease.bytes.size)
                self._latest.add(None)
                return
            held = self._remembering.held(job.boundary)
            key = job.digest + held
            if self._latest.holds(key):
                self._give_back(job.lease)
                self._push(_Bare(job.boundary, job.digest, held))
            else:
                self._push(job, job.lease.bytes.size)
            self._latest.add(key)

    def _push_bare(self, job: _Bare, key: str) -> None:
        with self._lock:
            self._push(job)
            self._latest.add(key)

    def _push(self, job: _Job, size_bytes: int = 0) -> None:
        with self._lock:
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
            if not self._queue:
                return None
            job = self._queue.popleft()
            if len(self._queue) == MOST_QUEUED - 1:  # it was full, and such a job may give back no memory
                self._freed.notify_all()
            return job

    def _do(self, job: _Job) -> None:
        if isinstance(job, _Bare):
            assert self._remembering is not None
            self._remembering.append_known(job.boundary, job.digest, None, held=job.held, summary=job.summary)
            return
        if not isinstance(job, _Copied):
            job()
            return
        try:
            if job.wait is not None:
                job.wait()
            data = job.lease.bytes
            hurried = job.wait is None or self._room.used > HURRIED * self._room.capacity
            if self._remembering is None or job.digest is None:
                self._store.append(job.boundary, data, hurried=hurried)
            else:
                self._remembering.append_known(job.boundary, job.digest, data, hurried=hurried)
        finally:
            self._give_back(job.lease)

    def _discard_queue(self) -> None:
        """Wake whoever waits for memory: after a failure nothing more is written."""
        with self._lock:
            self._closing = True
            self._queue.clear()
            self._freed.notify_all()
