"""Decides which module calls are looked into, and runs them under a dispatch mode."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tensortrace.tracer.hooks import Hooks
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.modules import Frame
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.types import Kind, Promise
from tensortrace.tracer.zoom.mode import OperationMode
from tensortrace.tracer.zoom.region import Region

Forward = Callable[..., Any]


def install(hooks: Hooks, promise: Promise, *, compiles: bool) -> None:
    """Look into the modules that the promise names; called once, right after the hooks were installed.

    ``compiles`` tells whether torch.compile does its work in this run (it does not under ``--eager``).
    """
    Zoom(hooks, promise, compiles=compiles).install()


class _Local(threading.local):
    def __init__(self) -> None:
        self.mode: OperationMode | None = None


class Zoom:
    """Enters a dispatch mode around each call of a module that was asked for, the outermost where they nest.

    A mode would make torch.compile skip what it compiles and run it otherwise, so that numbers change: no
    module with a compiled one inside is looked into, nor any where the program compiles bare functions,
    since nobody can tell who calls them.
    """

    def __init__(self, hooks: Hooks, promise: Promise, *, compiles: bool) -> None:
        self._session = hooks.session
        self._modules = hooks.modules
        self._globs = promise.zoom
        self._names = Selection(Promise(include=promise.zoom))
        self._steps = Selection(Promise(steps=promise.zoom_steps))
        self._compiles = compiles
        self._compiled_functions = compiles and any(map(_is_compiled, gc.get_objects()))
        self._local = _Local()

    def install(self) -> None:
        """Begin to look; until something matches, the trace says that nothing did."""
        self._modules.within = self._within
        self._session.patches.on_undo(self._leave)
        self._declare(
            f"no call of a module named {', '.join(self._globs)} was seen in the steps of --zoom-steps"
        )
        if self._compiles:
            self._watch_compile()

    def _leave(self) -> None:
        self._modules.within = None

    def _declare(self, reason: str | None) -> None:
        for kind in (Kind.OPERATION, Kind.OPERATION_GRAD):
            self._session.sink.absent(kind, reason)

    def _watch_compile(self) -> None:
        original = torch.compile

        @functools.wraps(original)
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            made = original(model, *args, **kwargs)
            if model is None or isinstance(model, nn.Module) or not callable(made):
                return made  # a decorator's factory comes back here with the function
            self._compiled_functions = self._compiled_functions or not _is_of_torch(model)
            return made if self._local.mode is None else self._outside(made)

        self._session.patches.function(original, compile)
        self._session.patches.bind()

    def _outside(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return what was compiled inside a call that is looked into, to be run without the mode."""

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._suspended():
                return compiled(*args, **kwargs)

        return run

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        mode = self._local.mode
        if mode is None:
            yield
            return
        self._local.mode = None
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._local.mode = mode

    def _within(
        self,
        module: nn.Module,
        frame: Frame,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a module's forward, under a mode of its own where it is to be looked into."""
        region = self._region(module, frame)
        if region is None:
            return forward(module, *args, **kwargs)
        mode = OperationMode(region)
        self._local.mode = mode
        try:
            with mode:
                result = forward(module, *args, **kwargs)
        finally:
            self._local.mode = None
        region.returned(result)
        return result

    @guard("zoom")
    def _region(self, module: nn.Module, frame: Frame) -> Region | None:
        session, at = self._session, frame.at
        if self._local.mode is not None or not frame.records or at.microbatch is None:
            return None
        if not self._steps.wants_step(at.step) or not self._names.wants_name(frame.name):
            return None
        if not session.wants(Kind.OPERATION, frame.name, at):
            return None
        if self._compiles and (self._compiled_functions or frame.compiled or _holds_compiled(module)):
            self._declare(
                "not observed: operations are hidden where the program uses torch.compile (try --eager)"
            )
            return None
        self._declare(None)
        call = session.clock.take(at, Kind.OPERATION, frame.name, "call")
        return Region(session, self._modules, at=at, name=frame.name, call=call)


def _is_compiled(thing: object) -> bool:
    """Tell whether something is what torch.compile made of a function of the program's.

    torch compiles some of its own when they are imported: masks, which are integers.
    """
    if type(thing) is not FunctionType or hasattr(thing, "_torchdynamo_disable"):
        return False
    original = getattr(thing, "_torchdynamo_orig_callable", None)
    return original is not None and not _is_of_torch(original)


def _is_of_torch(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _holds_compiled(module: nn.Module) -> bool:
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod")
        for part in module.modules()
    )
