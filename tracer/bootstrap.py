"""Starts recording inside a trainer process, and ends it before the process does."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NoReturn

from tensortrace.tracer import hooks
from tensortrace.tracer.dry_run import Tally
from tensortrace.tracer.environment import rank_environment
from tensortrace.tracer.faults import with_fault
from tensortrace.tracer.flight import FlightStore
from tensortrace.tracer.flight_signal import SIGNAL, Listener
from tensortrace.tracer.notices import describe, say
from tensortrace.tracer.recorder import Identity, RankStore, Recorder, Surroundings
from tensortrace.tracer.settings import FAULT_VARIABLE, VARIABLE, Settings, Start, decode
from tensortrace.tracer.types import Environment
from tensortrace.tracer.writer import RankWriter

FINISHED = "finished"
END_LAST = -1000
"""Among multiprocessing's finalizers ours runs last: the program may still train in its own."""


def start() -> None:
    """Record this process if its environment says so; called right after torch was imported.

    A recorder that cannot start says why in one line and leaves the program alone, unless ``--strict``.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    strict = False
    try:
        settings = decode(text)
        strict = settings.strict
        Guest(settings).move_in()
    except Exception as error:
        say(f"this process is not recorded: {describe(error)}")
        if strict:
            raise


class Guest:
    """The recorder of this process, its hooks, and the ways in which the process may end.

    One at a time: ``present`` is the one that has moved in and not out again.
    """

    present: ClassVar[Guest | None] = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._fault = os.environ.get(FAULT_VARIABLE, "")
        self._recorder = Recorder(
            settings,
            Surroundings(
                identify=identify,
                describe=self._describe,
                open_store=self._open_store,
                is_guest=_is_loader_worker,
                opened=self._opened,
            ),
        )
        self._hooks: hooks.Hooks | None = None
        self._leave = os._exit
        self._listener: Listener | None = None

    def move_in(self) -> None:
        """Patch torch, and see to it that the recording ends before the process does."""
        if self._settings.eager:
            set_stance("force_eager")
        self._hooks = hooks.install(self._recorder)
        if self._settings.start != Start():
            # it reads traces and layout files: what it imports is for those who ask for it
            from tensortrace.tracer import start as beginning

            beginning.install(self._hooks, self._settings.start, layout=self._settings.layout)
        if self._settings.forcing is not None:
            from tensortrace.tracer import force  # for those who ask for it

            force.install(self._hooks, self._settings.forcing, layout=self._settings.layout)
        if self._settings.promise.zoom:
            from tensortrace.tracer import zoom  # for those who ask for it

            zoom.install(self._hooks, self._settings.promise, compiles=not self._settings.eager)
        for fault in self._fault.split(","):
            if fault.startswith("hook:"):
                hooks.guard.inject(fault.removeprefix("hook:"))
        atexit.register(self._end)
        self._leave = os._exit
        _set_exit(_ending_first(self._leave, self._end))
        Guest.present = self

    def move_out(self, ended: str) -> None:
        """End the recording, wait until all is written, and leave torch and the process as they were."""
        Guest.present = None
        self._end(ended)
        if self._hooks is not None:
            self._hooks.remove()
        if self._settings.eager:
            set_stance("default")
        if self._listener is not None:
            self._listener.remove()
        atexit.unregister(self._end)
        if getattr(os._exit, "__wrapped__", None) is self._leave:
            _set_exit(self._leave)

    def _describe(self) -> Environment:
        changes = self._settings.start.options() | ({"eager": "True"} if self._settings.eager else {})
        return rank_environment(sys.argv, os.environ, start=changes)

    def _opened(self) -> None:
        """Children of multiprocessing run its finalizers, and when forked no atexit functions."""
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self._end, exitpriority=END_LAST)

    def _open_store(self, root: Path, identity: Identity) -> RankStore:
        if self._settings.dry_run:
            return Tally()
        promise = self._settings.promise
        writer = RankWriter(
            root, identity.rank, attempt=identity.attempt, compress=self._settings.compress, promise=promise
        )
        if not promise.keep_last:
            return with_fault(writer, self._fault)
        why_not = None
        if SIGNAL in promise.triggers:
            self._listener = Listener(lambda: self._recorder.step)
            why_not = self._listener.install()
        store = FlightStore(
            writer, promise, rank=identity.rank, listener=self._listener, on_end=self._recorder.finish
        )
        store.note(why_not)
        return with_fault(store, self._fault)

    def _end(self, ended: str | None = None) -> None:
        """Write what is pending and close; ``ended`` is None while the process is ending. Never raises.

        No thread of ours outlives this, also after a failure of the recorder: Python ends a thread that asks
        for the interpreter while it shuts down, and inside C++ code that aborts the whole process.
        """
        ended = ended or how_it_ends()
        with suppress(Exception):
            on_main = threading.current_thread() is threading.main_thread()
            if self._recorder.recording and self._hooks is not None and on_main:
                self._hooks.finish()
        with suppress(Exception):
            self._recorder.close(ended)


def identify() -> Identity:
    """Return which rank this is: torch.distributed if initialised, else the launcher's variables, else 0."""
    import torch.distributed as dist

    environ = os.environ
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if dist.is_available() and dist.is_initialized():
        return Identity(dist.get_rank(), dist.get_world_size(), attempt)
    return Identity(int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), attempt)


def how_it_ends() -> str:
    """Return ``finished`` or ``exception: TYPE``, for use while the process is ending.

    An exception is still in flight where multiprocessing runs its finalizers, is the context of the
    SystemExit that torch.multiprocessing makes of it, or was left by the interpreter when it printed it.
    """
    ended = ending(sys.exc_info()[1])
    kind = getattr(sys, "last_type", None)
    return ended if ended != FINISHED or kind is None else f"exception: {kind.__name__}"


def ending(error: BaseException | None) -> str:
    """Return ``finished``, or ``exception: TYPE`` where this error is what ends the program."""
    if isinstance(error, SystemExit):
        error = error.__context__ if error.code not in (None, 0) else None
    return FINISHED if error is None else f"exception: {type(error).__name__}"


def _is_loader_worker() -> bool:
    import torch.utils.data

    return torch.utils.data.get_worker_info() is not None


def set_stance(stance: str) -> None:
    """Say what compiled functions do from now on: ``force_eager`` runs them uncompiled."""
    import torch.compiler  # brings the whole compiler with it

    torch.compiler.set_stance(stance)


def _set_exit(leave: Callable[[int], NoReturn]) -> None:
    setattr(os, "_exit", leave)  # noqa: B010  # an assignment would not pass the type checker


def _ending_first(leave: Callable[[int], NoReturn], end: Callable[[], None]) -> Callable[[int], NoReturn]:
    """Return ``os._exit`` with the recording closed before it: many scripts end that way."""

    @functools.wraps(leave)
    def _exit(status: int) -> NoReturn:
        end()
        leave(status)

    return _exit
