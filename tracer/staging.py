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
from tensortrace.tracer.keeping import Keeping, Summary
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

    @property
    def keeping(self) -> Keeping | None:
        """What decides how much of each boundary is kept; None where ``remembers`` is 0."""

    def append_known(
        self, boundary: Boundary, digest: str, payload: NDArray[np.uint8] | None, *, hurried: bool = False,
        held: str = "", summary: Summary | None = None,
    ) -> object:  # fmt: skip
        """Store one boundary with this digest: its bytes are ``payload``, or a summary is all that is kept.

        Without either its content must be known, ``held`` alike. What was stored so is sure to last after
        ``flush`` only.
        """

    def flush(self) -> None:
        """Make what was stored last, whatever becomes of the process."""


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


class Taken(NamedTuple):
    """What was taken of a tensor: its bytes in ``lease``, once ``wait`` has returned, or no bytes.

    Without bytes the store knows the content by its digest, or a summary is all that is kept. ``key`` names a
    content that is held in some way, where the store remembers contents.
    """

    lease: Lease | None
    wait: Wait | None = None
    digest: str | None = None
    held: str = ""
    key: str | None = None
    summary: Summary | None = None


_Job = tuple[Boundary, Taken] | Callable[[], None]


class Stage:
    """A queue of at most ``capacity`` bytes, with the thread that empties it into a store.

    ``take``, ``queue`` and ``run_in_order`` may be called from several training threads.
    ``on_error`` and ``on_end`` are called on the writer thread: on the first failure of the store, and
    last of all. A tensor larger than the whole buffer is admitted alone, when the queue is empty.

    With a store that remembers, a copy on the host is hashed while it is warm: of a content that the store
    knows nothing is kept here and nothing done again. Nothing but the bytes tells: neither address nor
    version of a tensor changes with all that may be written to it. They only say what is likely: a tensor
    that was here before is hashed where it lies, and copied if its content is new after all.

    The lock is for training threads, to which room and latest belong; the writer takes it only to wait, and
    to wake who waits. Boundaries and memory go between through queues, which need none: a training thread
    that met the writer at a lock would lose more time than the copy takes.
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
        self._keeping = self._remembering.keeping if self._remembering else None
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
        self._returned: deque[int | None] = deque()  # offsets of leases that the writer is done with
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # the writer waits for it
        self._freed = threading.Condition(self._lock)  # and training threads for this
        self._waiting = 0
        self._closing = False
        self._broken = False
        self._written = 0
        self._unseen_bytes = 0
        self._pushed_bytes = self._done_bytes = 0  # counted by training threads, and by the writer
        self._thread = threading.Thread(target=self._run, name="tensortrace-writer", daemon=True)
        self._thread.start()

    def take(self, tensor: torch.Tensor, boundary: Boundary) -> Taken | None:
        """Copy the tensor, or what is kept of it, so that it may change; None where there is no room for it.

        Under ``block`` this waits for the writer, and returns None only once the stage is closing. What was
        taken is to be queued, and apart from that: a boundary gets its event number, under the caller's lock,
        only once its bytes are safe.
        """
        plain = is_plain(tensor)
        keeping = self._keeping
        sums = keeping is not None and keeping.sums(boundary)
        if plain and keeping is not None and (sums or self._was_here(tensor)):
            # of what is kept in full only a tensor that was here before is looked at where it lies
            view = bytes_of_plain(tensor)
            data = np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)
            digest = self._digest(tensor, view)
            if (bare := self._without_bytes(boundary, keeping, digest, data)) is not None:
                return bare
        lease = self._lend(tensor)
        if lease is None:
            return None
        try:
            taken = self._copy(tensor, lease, boundary, plain=plain)
            if sums and keeping is not None and taken.digest is not None:
                bare = self._without_bytes(boundary, keeping, taken.digest, lease.bytes)
                if bare is not None:
                    self._release(lease.offset)
                    return bare
        except BaseException:
            self._release(lease.offset)
            raise
        return taken

    def queue(self, boundary: Boundary, taken: Taken) -> None:
        """Queue a boundary with what was taken of it, without bytes that the store will know by then."""
        key, lease = taken.key, taken.lease
        with self._lock:
            if key is not None and lease is not None and self._latest.holds(key):
                self._release(lease.offset)
                taken, lease = taken._replace(lease=None, wait=None), None
            self._push((boundary, taken), 0 if lease is None else lease.bytes.size)
            self._latest.add(key)

    def _copy(self, tensor: torch.Tensor, lease: Lease, boundary: Boundary, *, plain: bool) -> Taken:
        """Copy the tensor into its memory, and hash it while it is warm."""
        wait = None
        if plain:
            copy_plain(tensor, lease.address, tensor.nbytes)
        else:
            wait = copy_bytes(tensor, lease.memory)
        if wait is not None or (keeping := self._keeping) is None:
            return Taken(lease, wait)
        digest = self._digest(tensor, lease.bytes.data)
        keeping.look(boundary, lease.bytes)
        held = keeping.held(boundary)
        return Taken(lease, None, digest, held, digest + held)

    def _lend(self, tensor: torch.Tensor) -> Lease | None:
        """Return memory for this tensor's bytes; None where there is none under the pressure policy."""
        with self._lock:
            if (lease := self._try_lend(tensor)) is not None or self._pressure == "drop":
                return lease
            self._waiting += 1  # from here on the writer says when it has given something back
            try:
                while not (self._closing or self._broken):
                    if (lease := self._try_lend(tensor)) is not None:
                        return lease
                    self._changed.notify_all()
                    self._freed.wait()
            finally:
                self._waiting -= 1
        return None

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Tell the store of the meshes that shards refer to."""
        if self._keeping is not None:
            self._keeping.know(meshes)

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
        self, boundary: Boundary, keeping: Keeping, digest: str, data: NDArray[np.uint8]
    ) -> Taken | None:
        """Return what is taken of a boundary without these bytes; None where they are needed."""
        held = keeping.held(boundary)
        key = digest + held
        with self._lock:
            if self._closing or self._broken or len(self._queue) >= MOST_QUEUED:
                return None
            known = self._latest.holds(key)
        summary = None
        if not known and (summary := keeping.summary(boundary, data)) is None:
            return None
        return Taken(None, None, digest, held, key, summary)

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

    def _try_lend(self, tensor: torch.Tensor) -> Lease | None:
        if self._closing or self._broken or len(self._queue) >= MOST_QUEUED:
            return None
        while self._returned:
            self._release(self._returned.popleft())
        size = tensor.nbytes
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

    def _release(self, offset: int | None) -> None:
        """Let a training thread use what was lent at this offset for something else."""
        with self._lock:
            if offset is None:
                self._oversized = False
            else:
                self._room.release(offset)
            if self._waiting:
                self._freed.notify_all()

    def _give_back(self, lease: Lease) -> None:
        """Return memory to the training threads; called by the writer."""
        self._returned.append(lease.offset)
        self._done_bytes += lease.bytes.size
        self._say_freed()

    def _say_freed(self) -> None:
        if self._waiting:
            with self._lock:
                self._freed.notify_all()

    def _push(self, job: _Job, size_bytes: int = 0) -> None:
        self._queue.append(job)
        with self._lock:
            self._pushed_bytes += size_bytes
            self._unseen_bytes += size_bytes
            if self._unseen_bytes >= WAKE_BYTES:
                self._unseen_bytes = 0
                self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._do(job)
                del job  # while there is nothing to do, nothing is held that was lent
                self._written += 1
        except BaseException as error:
            self._broken = True
            self._on_error(error)
        finally:
            self._discard_queue()
            self._on_end()

    def _next(self) -> _Job | None:
        """Return the next job, None at the end; what was stored is made to last before a longer wait."""
        if not self._wait_a_little() and self._remembering is not None:
            self._remembering.flush()
        while not self._wait_a_little():
            pass
        if not self._queue:
            return None
        job = self._queue.popleft()
        if len(self._queue) >= MOST_QUEUED - 1:  # it was full, and such a job may give back no memory
            self._say_freed()
        return job

    def _wait_a_little(self) -> bool:
        """Wait until there is a job or the stage is closing; False where neither came in time."""
        if not self._queue:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait(LINGER_S)
        return bool(self._queue) or self._closing

    def _do(self, job: _Job) -> None:
        if not isinstance(job, tuple):
            job()
            return
        boundary, taken = job
        lease, remembering = taken.lease, self._remembering
        if lease is None:
            assert remembering is not None
            assert taken.digest is not None
            remembering.append_known(boundary, taken.digest, None, held=taken.held, summary=taken.summary)
            return
        try:
            if taken.wait is not None:
                taken.wait()
            waiting_bytes = self._pushed_bytes - self._done_bytes
            hurried = taken.wait is None or waiting_bytes > HURRIED * self._room.capacity
            if remembering is None or taken.digest is None:
                self._store.append(boundary, lease.bytes, hurried=hurried)
            else:
                remembering.append_known(boundary, taken.digest, lease.bytes, hurried=hurried)
        finally:
            self._give_back(lease)

    def _discard_queue(self) -> None:
        """Wake whoever waits for memory: after a failure nothing more is written."""
        with self._lock:
            self._closing = True
            self._queue.clear()
            self._freed.notify_all()
