"""The recorder of one rank: takes tensors from hooks, numbers them, and owns how recording ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch

from tensortrace.tracer import layout
from tensortrace.tracer.claim import claim
from tensortrace.tracer.copies import dtype_name, unobserved, unsupported
from tensortrace.tracer.module_settings import together
from tensortrace.tracer.notices import describe, say
from tensortrace.tracer.quota import Metered
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.settings import Settings
from tensortrace.tracer.staging import Stage, Store
from tensortrace.tracer.types import (
    INIT_STEP,
    Boundary,
    Drops,
    Environment,
    Kind,
    Mesh,
    Meta,
    Module,
    RankManifest,
    Shard,
)

_NO_META = Meta()
_STATE = frozenset({Kind.PARAM, Kind.BUFFER, Kind.OPTIMIZER_STATE, Kind.RNG})


class Identity(NamedTuple):
    """Which rank this process is; ``attempt`` counts elastic restarts from 0."""

    rank: int
    world_size: int
    attempt: int


class RankStore(Store, Protocol):
    """The files of one rank; after ``Recorder`` has opened it, used by the writer thread only."""

    def end_step(self) -> None:
        """Note that a step's boundaries are complete."""

    def write_manifest(self, manifest: RankManifest) -> None:
        """Replace ``rank.json``."""

    def close(self) -> None:
        """Seal what is open."""


class Surroundings(NamedTuple):
    """What the recorder asks of the process it lives in, when the first boundary arrives.

    ``is_guest`` tells whether this process must not record at all (a DataLoader worker); ``opened`` is
    called once the recorder has opened its files, in the process that it opened them in.
    """

    identify: Callable[[], Identity]
    describe: Callable[[], Environment]
    open_store: Callable[[Path, Identity], RankStore]
    is_guest: Callable[[], bool]
    opened: Callable[[], None]


class Recorder:
    """Implements ``hooks.sink.Sink`` for one process.

    Nothing is opened before the first boundary, so that a process which imports torch and never runs a
    module leaves no trace, and so that a rank is known late (a spawned process after
    ``init_process_group``). The opened recorder belongs to its process: in a forked child it is inactive.

    Life: idle → recording → ended. ``fail`` and ``close`` end it, whichever comes first; the writer thread
    then writes what is queued, ``rank.json``, and closes the files.
    """

    def __init__(self, settings: Settings, surroundings: Surroundings) -> None:
        self._settings = settings
        self._surroundings = surroundings
        self._selection = Selection(settings.promise)
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._identity = Identity(0, 1, 0)
        self._stage: Stage | None = None
        self._store: RankStore | None = None
        self._environment = Environment()
        self._ended: str | None = None
        self._error: BaseException | None = None
        self._device = "cpu"
        self._events = 0
        self._steps = 0
        self._meshes: dict[str, Mesh] = {}
        self._modules: dict[str, Module] = {}
        self._alike: tuple[Module, ...] = ()
        self._absent: dict[str, str] = {}
        self._drops = Drops()

    @property
    def active(self) -> bool:
        """Tell whether this process still records (under ``--strict`` also: has an error to raise)."""
        if self._ended is not None:
            return self._settings.strict and self._error is not None
        return self._pid is None or self._pid == os.getpid()

    @property
    def recording(self) -> bool:
        """Tell whether files are open in this process, so that there is something to finish."""
        return self._pid == os.getpid() and self._ended is None

    @property
    def step(self) -> int:
        """The step in which the program is; INIT_STEP before the first."""
        return self._steps - 1

    def wants(self, kind: Kind, name: str, *, step: int) -> bool:
        """Tell whether this boundary is recorded, so that hooks can skip work.

        Before the first window only the state is: a process that runs a model without ever training it (a
        helper that computes features) must leave no trace.
        """
        if step == INIT_STEP and kind not in _STATE:
            return False
        return self._selection.wants(kind, name, step=step)

    def wants_step(self, step: int) -> bool:
        """Tell whether any boundary of this step is recorded, so that hooks can rest in others."""
        return self._selection.wants_step(step)

    def emit(
        self,
        tensor: torch.Tensor,
        *,
        step: int,
        microbatch: int | None,
        kind: Kind,
        name: str,
        slot: str,
        call: int = 0,
        recompute: bool = False,
        shard: Shard | None = None,
        producers: tuple[int, ...] = (),
        meta: Meta | None = None,
    ) -> int | None:
        """Copy the tensor, queue it and return its event number; None where it was not recorded."""
        if not self.wants(kind, name, step=step) or not self._ready():
            return None
        with unobserved():
            if reason := unsupported(tensor):  # which may not even have a shape
                self._dropped(reason, tensor.numel() * tensor.element_size())
                return None
            event = self._events  # likely: another thread, or a signal's handler, may come in between
            boundary = Boundary(
                event=event, step=step, microbatch=microbatch, kind=kind, name=name, slot=slot,
                dtype=dtype_name(tensor.dtype), local_shape=tuple(tensor.shape), call=call,
                recompute=recompute, shard=shard, producers=producers, meta=meta or _NO_META,
            )  # fmt: skip
            stage = self._stage
            assert stage is not None, "opened by _ready"
            if not tensor.is_cpu:
                self._device = tensor.device.type
            taken = stage.take(tensor, boundary)
            if taken is None:
                self._refused(tensor)
                return None
            with self._lock:  # it gets its number once its bytes are safe, and is queued in that order
                if event != self._events:
                    event = self._events
                    boundary = msgspec.structs.replace(boundary, event=event)
                self._events += 1
                stage.queue(boundary, taken)
            return event

    def step_began(self, step: int) -> None:
        """Note that a window opened; the boundaries of the one before are complete."""
        self._steps = max(self._steps, step + 1)
        if self.recording and self._stage is not None and step > 0:
            self._stage.run_in_order(self._end_step)
            if self._settings.dry_run:
                self._end("finished")

    def mesh(self, name: str, mesh: Mesh) -> None:
        """Note a mesh that shards refer to; it must come before the first boundary that does."""
        with self._lock:
            known = self._meshes.get(name)
            assert known in (None, mesh), f"mesh {name} declared twice, differently"
            self._meshes[name] = mesh
            meshes = dict(self._meshes)
        if known is None:
            if self._stage is not None:
                self._stage.know(meshes)
            self._save_manifest()

    def module(self, name: str, module: Module) -> None:
        """Note what is known of a module; it is written with the manifest of the step's end."""
        with self._lock:
            self._modules[name] = module
            self._alike = ()

    def absent(self, kind: Kind, reason: str | None) -> None:
        """Declare that this run has no such rung; a reason of None takes the declaration back."""
        with self._lock:
            if reason is None:
                self._absent.pop(kind.value, None)
            else:
                self._absent[kind.value] = reason

    def fail(self, where: str, error: BaseException) -> None:
        """Stand down: say once why, write what is queued, record nothing more.

        Never raises, unless ``--strict`` asked for it: then the error goes on into the training.
        """
        with self._lock:
            first = self._error is None
            if first:  # also after ``close``, while the queue is written
                self._error = error
                self._ended = f"failed: {where}: {describe(error)}"
                self._end(self._ended)
        if first:
            with suppress(Exception):
                self._say_why(where, error)
        if self._settings.strict and not self._on_writer_thread():
            raise error

    def finish(self) -> None:
        """End the recording while the program goes on: all that was wanted is there. On any thread."""
        self._end("finished")

    def close(self, ended: str) -> None:
        """End the recording and wait until all is written; for the end of the program, may be repeated.

        ``ended`` is ``finished`` or ``exception: TYPE``; an earlier failure stands.
        """
        if self._pid != os.getpid() or self._stage is None:
            return
        self._end(ended)
        if not self._stage.close():
            say(f"rank {self._identity.rank}: the writer is stuck; the end of the trace is missing")

    def _ready(self) -> bool:
        """Tell whether a boundary can be taken, opening the files for the first one."""
        if self._error is not None and self._settings.strict:
            raise self._error
        if not self.active:
            return False
        if self._stage is None:
            with self._lock:
                if self._stage is None and self._ended is None:
                    self._open()
        return self._ended is None

    def _open(self) -> None:
        if self._surroundings.is_guest():
            self._ended = "guest"
            return
        self._pid = os.getpid()
        try:
            self._identity = self._surroundings.identify()
            self._environment = self._surroundings.describe()
            self._store = self._open_store()
            self._store.write_manifest(self._manifest())
        except Exception as error:
            self.fail("opening the trace", error)
            return
        self._stage = self._start_stage(self._store)
        self._stage.know(dict(self._meshes))
        self._surroundings.opened()

    def _open_store(self) -> RankStore:
        root, me = Path(self._settings.root), self._identity
        store, attempt = claim(
            root, me.rank, attempt=me.attempt, host=socket.gethostname(),
            open_folder=lambda number: self._surroundings.open_store(root, me._replace(attempt=number)),
        )  # fmt: skip
        self._identity = me._replace(attempt=attempt)
        return store

    def _start_stage(self, store: RankStore) -> Stage:
        return Stage(
            Metered(store, self._settings, on_drop=self._dropped),
            capacity=self._settings.buffer_bytes,
            pressure=self._settings.on_pressure,
            on_error=lambda error: self.fail("writing", error),
            on_end=self._close_store,
        )

    def _end(self, ended: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = ended
        if self._stage is not None:
            self._stage.shut()

    def _end_step(self) -> None:
        assert self._store is not None
        self._store.end_step()
        self._store.write_manifest(self._manifest())

    def _save_manifest(self) -> None:
        if self._stage is not None and (store := self._store) is not None:
            self._stage.run_in_order(lambda: store.write_manifest(self._manifest()))

    def _close_store(self) -> None:
        """Last act of the writer thread; after a failure as much of it as is possible."""
        assert self._store is not None
        for act in (self._store.end_step, self._finish_manifest, self._store.close):
            try:
                act()
            except Exception as error:
                self.fail("closing the trace", error)

    def _finish_manifest(self) -> None:
        assert self._store is not None
        self._store.write_manifest(self._manifest())

    def _manifest(self) -> RankManifest:
        with self._lock:
            return RankManifest(
                format=layout.version_of(self._settings.promise), rank=self._identity.rank,
                world_size=self._identity.world_size, attempt=self._identity.attempt,
                pid=os.getpid(), host=socket.gethostname(), device=self._device, steps=self._steps,
                boundaries=self._events, meshes=dict(self._meshes), promise=self._settings.promise,
                absent=dict(self._absent), drops=self._drops, environment=self._environment,
                ended=self._ended, modules=self._modules_alike(), ignorable=("modules",),
            )  # fmt: skip

    def _modules_alike(self) -> tuple[Module, ...]:
        """Return the modules noted so far, those that are alike together; the lock is held."""
        if not self._alike:
            self._alike = together(self._modules)
        return self._alike

    def _refused(self, tensor: torch.Tensor) -> None:
        if self._ended is None:
            self._dropped("buffer_full", tensor.numel() * tensor.element_size())

    def _dropped(self, reason: str, size_bytes: int) -> None:
        with self._lock:
            first = reason not in self._drops.reasons
            reasons = self._drops.reasons | {reason: self._drops.reasons.get(reason, 0) + 1}
            self._drops = Drops(self._drops.count + 1, self._drops.size_bytes + size_bytes, reasons)
        if first and reason in ("max_bytes", "min_free"):
            say(f"rank {self._identity.rank}: limit {reason} reached; further boundaries are dropped")

    def _say_why(self, where: str, error: BaseException) -> None:
        rank = (self._identity if self._stage else self._surroundings.identify()).rank
        say(f"rank {rank}: recording stopped ({where}: {describe(error)}); training goes on")

    def _on_writer_thread(self) -> bool:
        return self._stage is not None and self._stage.is_writer(threading.current_thread())
