"""Records the program's own collectives, and the gradients that they reduce."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.patches import Patches
from tensortrace.tracer.hooks.reductions import Reductions
from tensortrace.tracer.hooks.session import Session, group_ranks
from tensortrace.tracer.hooks.source import user_line
from tensortrace.tracer.hooks.walk import tensors_in
from tensortrace.tracer.types import Kind, Meta


@dataclass(frozen=True, slots=True)
class Operation:
    """Which arguments a collective reads and which it writes, and whether it combines ranks' values."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reduces: bool = False


OPERATIONS = {
    "all_reduce": Operation(("tensor",), ("tensor",), reduces=True),
    "all_reduce_coalesced": Operation(("tensors",), ("tensors",), reduces=True),
    "reduce": Operation(("tensor",), ("tensor",), reduces=True),
    "broadcast": Operation(("tensor",), ("tensor",)),
    "all_gather": Operation(("tensor",), ("tensor_list",)),
    "all_gather_into_tensor": Operation(("input_tensor",), ("output_tensor",)),
    "all_gather_single": Operation(("input_tensor",), ("output_tensor",)),
    "reduce_scatter": Operation(("input_list",), ("output",), reduces=True),
    "reduce_scatter_tensor": Operation(("input",), ("output",), reduces=True),
    "reduce_scatter_single": Operation(("input",), ("output",), reduces=True),
    "all_to_all": Operation(("input_tensor_list",), ("output_tensor_list",)),
    "all_to_all_single": Operation(("input",), ("output",)),
    "gather": Operation(("tensor",), ("gather_list",)),
    "scatter": Operation(("scatter_list",), ("tensor",)),
    "send": Operation(("tensor",), ()),
    "isend": Operation(("tensor",), ()),
    "recv": Operation((), ("tensor",)),
    "irecv": Operation((), ("tensor",)),
}

OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
"""Collectives on pickled objects; the byte tensors that they exchange are nobody's boundaries."""


LIBRARIES = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed._composable")
"""Wrappers whose own collectives aren't the program's: what they do to gradients is recorded as that."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.coalescing: list[list[_Started]] = []


@dataclass(frozen=True, slots=True)
class _Started:
    """A collective whose output is awaited; the tensors are held weakly."""

    name: str
    operation: Operation
    call: int
    at: Moment
    meta: Meta
    outputs: tuple[tuple[str, weakref.ref[torch.Tensor]], ...]
    arrives: bool = True


class Collectives:
    """Wraps the functions of ``torch.distributed``; only outermost calls are the program's own."""

    def __init__(self, session: Session, reductions: Reductions) -> None:
        self._session = session
        self._reductions = reductions
        self._local = _Local()
        self._awaited = Awaited()

    def install(self) -> None:
        """Wrap every collective that this build of torch has."""
        if not dist.is_available():
            return
        self._awaited.install(self._session.patches)
        self._session.on_read.insert(0, self._awaited.settle)
        for name, operation in OPERATIONS.items():
            original = getattr(dist, name, None)
            if original is not None:
                self._session.patches.function(original, self._wrapped(name, operation, original))
        manager = getattr(dist.distributed_c10d, "_coalescing_manager", None)
        if manager is not None:
            self._session.patches.function(manager, self._coalescing(manager))
        for name in OF_OBJECTS:
            self._session.patches.function(getattr(dist, name), self._silent(getattr(dist, name)))

    def _wrapped(self, name: str, operation: Operation, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._local.depth or _is_torchs(sys._getframe(1)):
                return original(*args, **kwargs)
            started = self._begin(name, operation, signature, args, kwargs)
            self._local.depth += 1
            try:
                work = original(*args, **kwargs)
            finally:
                self._local.depth -= 1
            if started is None:
                return work
            if self._local.coalescing:
                self._local.coalescing[-1].append(started)
                return work
            if work is None or not hasattr(work, "wait"):
                self._finish(started)
            else:
                self._awaited.expect(work, functools.partial(self._finish, started))
            return work

        return collective

    def _coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the context in which collectives are only collected: they run when it ends."""

        @functools.wraps(original)
        @contextmanager
        def coalescing(*args: Any, **kwargs: Any) -> Iterator[Any]:
            collected: list[_Started] = []
            with original(*args, **kwargs) as manager:
                self._local.coalescing.append(collected)
                try:
                    yield manager
                finally:
                    self._local.coalescing.pop()
            if not manager.works:
                self._finish_all(collected)
            else:
                self._awaited.expect(manager.works[-1], functools.partial(self._finish_all, collected))

        return coalescing

    def _silent(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            self._local.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._local.depth -= 1

        return collective

    @guard("collective: before")
    def _begin(
        self,
        name: str,
        operation: Operation,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Started | None:
        self._session.collectives += 1
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given, session = bound.arguments, self._session
        at = session.clock.forward_moment() if session.clock.in_root() else session.clock.backward_moment()
        op = str(given["op"]).removeprefix("RedOpType.").lower() if "op" in given else None
        meta = Meta(op=op, ranks=group_ranks(given.get("group")), source=user_line())
        call = session.clock.take(at, Kind.COLLECTIVE, name, "in").number
        for slot, tensor in _slots("in", [given.get(key) for key in operation.reads]):
            session.emit(tensor, at, Kind.COLLECTIVE, name, slot, call=call, meta=meta)
        outputs = tuple(
            (slot, weakref.ref(tensor))
            for slot, tensor in _slots("out", [given.get(key) for key in operation.writes])
        )
        return _Started(name, operation, call, at, meta, outputs, _arrives(given))

    def _finish_all(self, collected: list[_Started]) -> None:
        for started in collected:
            self._finish(started)

    @guard("collective: after")
    def _finish(self, started: _Started) -> None:
        session = self._session
        written = [(slot, tensor) for slot, held in started.outputs if (tensor := held()) is not None]
        for slot, tensor in written:
            session.emit(
                tensor, started.at, Kind.COLLECTIVE, started.name, slot, call=started.call, meta=started.meta
            )
        if started.operation.reduces and started.arrives:
            self._reductions.collective_ended(
                [tensor for _, tensor in written], op=started.name, ranks=started.meta.ranks
            )


class Awaited:
    """Tells when the handle of an asynchronous collective was waited for.

    The handle itself is left as it is, since programs give it to torch's own code, which takes no other
    object in its place: its class is watched instead.
    """

    def __init__(self) -> None:
        self._expected: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        """Watch every handle's ``wait``."""
        expected, original = self._expected, dist.Work.wait

        @functools.wraps(original)
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            finished = expected.pop(self, None) if expected else None
            if finished is not None:
                finished()
            return result

        patches.attribute(dist.Work, "wait", wait)

    @guard("collective: handle")
    def expect(self, work: Any, finished: Callable[[], None]) -> None:
        """Call ``finished`` once the program has waited for the handle; it is held weakly."""
        self._expected[work] = finished

    def settle(self) -> None:
        """See to handles that are done though nothing in Python waited for them."""
        for work, finished in list(self._expected.items()):
            if work.is_completed():
                self._expected.pop(work, None)
                finished()


def _arrives(given: Mapping[str, Any]) -> bool:
    """Tell whether a collective leaves its result on this rank: a ``reduce`` does on one rank only."""
    if given.get("group_dst") is not None:
        return bool(dist.get_rank(given.get("group")) == given["group_dst"])
    return given.get("dst") is None or bool(dist.get_rank() == given["dst"])


def _is_torchs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(LIBRARIES)


def _slots(prefix: str, values: list[object]) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor): ``in`` for the only argument, ``in.0`` … for the items of a list."""
    found: list[tuple[str, torch.Tensor]] = []
    for value in values:
        found += tensors_in(value, prefix)
    return found
