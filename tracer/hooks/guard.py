"""The one place where the recorder swallows its own errors, so that no hook can harm the training."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import ParamSpec, TypeVar

import torch
from torch.utils.data import get_worker_info

from tensortrace.tracer.hooks.frames import leave_out
from tensortrace.tracer.hooks.sink import Sink

P = ParamSpec("P")
R = TypeVar("R")

GUARDED: set[str] = set()
"""The names of all guarded hooks; a test raises inside each of them."""

_lock = threading.RLock()
_faults: set[str] = set()
_armed: list[Sink] = []
_retiring: list[Callable[[], None]] = []
_hidden = 0


class InjectedFault(RuntimeError):
    """The error that ``inject`` makes a hook raise."""


def arm(sink: Sink) -> None:
    """Let guarded hooks run, and report their errors to this sink."""
    _armed[:] = [sink]


def disarm() -> None:
    """Make every guarded hook a no-op, and forget injected faults."""
    _armed.clear()
    _retiring.clear()
    _faults.clear()


def inject(name: str) -> None:
    """Make the hook of this name raise whenever it is called; for tests of the guard."""
    _faults.add(name)


def on_retire(action: Callable[[], None]) -> None:
    """Call ``action`` on the first hook that runs once the sink has stood down: nothing will be recorded.

    Until ``disarm``. It takes out hooks that cost something however soon they return, and may not fail.
    """
    _retiring.append(action)


def is_armed() -> bool:
    """Tell whether hooks may record at all; False once the sink was seen to have stood down."""
    return bool(_armed)


def alone() -> AbstractContextManager[object]:
    """Return a context in which no hook runs on another thread; not a guard, errors go on."""
    return _lock


def is_active() -> bool:
    """Tell whether hooks record here and now: not while compiling or capturing, not in data workers.

    Nor inside a transform of torch.func, whose tensors have no storage of their own.
    """
    return not torch.compiler.is_compiling() and _active() is not None


def _active() -> Sink | None:
    """Return what hooks record into here and now; not to be called while compiling, which would trace it."""
    if _hidden:
        return None
    sink = next(iter(_armed), None)  # another thread may disarm meanwhile
    if sink is None:
        return None
    if not sink.active:
        _retire()
        return None
    if torch._C._get_tracing_state() is not None or get_worker_info() is not None:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return None if cuda_in_use() and torch.cuda.is_current_stream_capturing() else sink


def _retire() -> None:
    """Let every hook return at once from now on: a sink that stood down never records again."""
    _armed.clear()
    with suppress(IndexError):  # another thread may see it at once, and take the last
        while _retiring:
            _retiring.pop()()


def hide(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with nothing recorded of what it does: a library's own business."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        global _hidden
        _hidden += 1
        try:
            return function(*args, **kwargs)
        finally:
            _hidden -= 1

    return hidden


def cuda_in_use() -> bool:
    """Tell whether the program has initialised CUDA; asking anything else of it might do that."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def guard(name: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator under which a hook's error ends the recording, not the training.

    The hook returns None while nothing records, when it fails, and once the sink stood down. Hooks run one
    at a time (autograd has threads of its own). A guarded function must not call the program's own code,
    whose errors are the program's.
    """
    GUARDED.add(name)

    def decorate(hook: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if torch.compiler.is_compiling() or (sink := _active()) is None:
                return None
            try:
                with _lock:
                    if _faults and name in _faults:
                        raise InjectedFault(name)
                    return hook(*args, **kwargs)
            except Exception as error:
                sink.fail(name, error)
            return None

        leave_out(guarded)
        return guarded

    return decorate
