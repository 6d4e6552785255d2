"""Records what enters and leaves each module call, and the gradients of both."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn

from tensortrace.tracer.hooks import uses
from tensortrace.tracer.hooks.activation_grads import GradHooks
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.frames import leave_out, pass_through
from tensortrace.tracer.hooks.guard import guard, is_armed
from tensortrace.tracer.hooks.names import ModuleName
from tensortrace.tracer.hooks.optimizer_depth import inside_optimizer
from tensortrace.tracer.hooks.places import Places
from tensortrace.tracer.hooks.plain import PlainModules
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.source import user_line
from tensortrace.tracer.hooks.walk import tensors_of_call, tensors_of_result
from tensortrace.tracer.placements import Place, in_use, is_dtensor, is_own_input, own_class
from tensortrace.tracer.types import COMPILED, COUPLES_ROWS, INIT_STEP, ROOT, Kind, Meta


class Taken(NamedTuple):
    """Under which call number and event a tensor of a module call was recorded, and its place if told."""

    call: int
    place: Place | None
    event: int | None


class Frame:
    """One module call in progress. ``outputs`` are the events of the calls made inside it so far.

    ``taken`` is what was recorded of it, by slot; ``anchors`` are tensors behind which the graph goes on
    where what is computed of them was cut off, kept only where values are forced.
    """

    def __init__(self, name: ModuleName, *, records: bool, opens_root: bool) -> None:
        self.name = name.name
        self.entered = name.entered or name.name
        self.left = name.left or name.name
        self.module: int | None = None
        self.records = records
        self.rests = False
        self.records_outputs = True
        self.opens_root = opens_root
        self.compiled = False
        self.at = Moment(0, None)
        self.meta = Meta()
        self.places: dict[str, Place] = {}
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.plain = False
        self.watched: list[tuple[Hashable, torch.Tensor]] = []
        self.taken: dict[str, Taken] = {}
        self.anchors: list[torch.Tensor] = []


class Forces(Protocol):
    """What gives a live run other values than its own, once those were recorded (``tracer.force``)."""

    def given(
        self, frame: Frame, parent: Frame | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a call is to be given; what it was given has been recorded."""

    def returned(self, frame: Frame, parent: Frame | None, result: Any) -> Any:
        """Return what a call is to return; what it returned has been recorded."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.resting = False


class Modules:
    """Watches module calls through ``nn.Module._call_impl``; one stack of calls per thread.

    ``within``, where set, runs a call that is being watched: it is given the module, its frame, the function
    to call, and what to call it with. ``forces``, where set, gives calls and their callers other values.

    In a window of which nothing is recorded only the outermost call is looked at, for the clock, and
    modules that have no name yet; the thread is ``resting`` while it runs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = _Local()
        self.within: Callable[[nn.Module, Frame, Callable[..., Any], Any, Any], Any] | None = None
        self.forces: Forces | None = None
        self.grads = GradHooks(session)
        session.scope = self._scope
        self._plain = PlainModules(session)
        self._places = Places()
        session.after_backward.append(self._places.backward_ended)
        session.learns = self._places.any
        self._sees_own_outputs = False

    def install(self) -> None:
        """Wrap the call of every module, and of those that ``Module.compile`` compiles in place."""
        original_call: Callable[..., Any] = nn.Module._call_impl
        original_compile: Callable[..., Any] = nn.Module.compile
        modules, local, session = self, self._local, self._session

        @functools.wraps(original_call)
        def _call_impl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not is_armed():
                return original_call(self, *args, **kwargs)
            if local.resting and session.quiet and session.names.is_named(self):
                return original_call(self, *args, **kwargs)
            frame = modules.enter(self, args, kwargs)
            if frame is None:
                return original_call(self, *args, **kwargs)
            try:
                if modules.forces is not None and frame.records:
                    args, kwargs = modules.forces.given(frame, modules._parent(frame), args, kwargs)
                if modules.within is None:
                    result = original_call(self, *args, **kwargs)
                else:
                    result = modules.within(self, frame, original_call, args, kwargs)
                modules.leave(self, frame, args, kwargs, result)
                if modules.forces is not None and frame.records and frame.records_outputs:
                    result = modules.forces.returned(frame, modules._parent(frame), result)
            finally:
                modules.unwind(frame)
            return result

        @functools.wraps(original_compile)
        def compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.__dict__["_call_impl"] = types.MethodType(original_call, self)  # which it will compile
            try:
                original_compile(self, *args, **kwargs)
            finally:
                del self.__dict__["_call_impl"]
            compiled = self._compiled_call_impl
            if compiled is not None:
                modules.watch_compiled(self, compiled)

        pass_through(_call_impl)
        leave_out(Modules.unwind)
        self._session.patches.attribute(nn.Module, "_call_impl", _call_impl)
        self._session.patches.attribute(nn.Module, "compile", compile)

    def watch_compiled(self, module: nn.Module, compiled: Any) -> None:
        """Watch the outside of a module that was compiled in place; inside there are no calls to see."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            frame = self.enter(module, args, kwargs)
            if frame is None:
                return compiled(*args, **kwargs)
            try:
                result = compiled(*args, **kwargs)
                self.leave(module, frame, args, kwargs, result)
            finally:
                self.unwind(frame)
            return result

        pass_through(call)
        module._compiled_call_impl = call
        reference = weakref.ref(module)

        def restore() -> None:
            module = reference()
            if module is not None and module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        self._session.patches.on_undo(restore)

    @guard("module inputs")
    def enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Frame | None:
        """Record a call's inputs and put it on the stack; None for calls that nobody may see."""
        session, stack = self._session, self._local.stack
        if isinstance(module, fx.GraphModule) and not session.names.is_stage(module):
            return None
        session.note_wrapper(module)
        name = session.names.module(module)
        opens_root = not stack and not session.clock.is_recompute()
        inside_compiled = bool(stack) and stack[-1].compiled and stack[-1].name == name.name
        frame = Frame(name, records=not name.wraps and not inside_compiled, opens_root=opens_root)
        frame.compiled = name.compiled or inside_compiled
        is_root = all(not outer.records for outer in stack) and not session.clock.is_recompute()
        stack.append(frame)
        if opens_root:
            if session.clock.step == INIT_STEP and session.clock.grad_enabled():
                session.prelude.window_opens(module)
            session.clock.root_began(inside_optimizer=inside_optimizer())
            if session.clock.step == INIT_STEP and not session.clock.grad_enabled():
                session.prelude.pass_began(module, session.optimizers)
        frame.at = session.clock.forward_moment()
        if session.quiet and not session.sink.wants_step(frame.at.step):
            frame.records = False
            frame.rests = not self._local.resting
            self._local.resting = True
        if module._forward_hooks and frame.records and in_use():
            frame.module = id(module)
            self._see_own_outputs()
        if frame.records:
            self._record_inputs(module, frame, args, kwargs, is_root=is_root)
        return frame

    def _see_own_outputs(self) -> None:
        """Let a global hook see what a forward itself returned, before hooks of the module change it.

        A parallel style makes a plain tensor of the DTensor that its module returns, and its place is lost.
        """
        if not self._sees_own_outputs:
            self._sees_own_outputs = True
            handle = nn.modules.module.register_module_forward_hook(self._forward_returned)
            self._session.patches.on_undo(handle.remove)

    def _forward_returned(self, module: nn.Module, args: tuple[object, ...], result: object) -> Any:
        frame = self._record_returned(module, args, result)
        if frame is None or self.forces is None:
            return None
        return self.forces.returned(frame, self._parent(frame), result)

    @guard("module outputs")
    def _record_returned(self, module: nn.Module, args: tuple[object, ...], result: object) -> Frame | None:
        stack = self._local.stack
        if stack and stack[-1].module == id(module):
            if any(is_dtensor(tensor) for _, tensor in tensors_of_result(result)):
                self._record_outputs(module, stack[-1], args, {}, result)
                stack[-1].records_outputs = False
                return stack[-1]
        return None

    @guard("module outputs")
    def leave(
        self,
        module: nn.Module,
        frame: Frame,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        """Record a call's outputs."""
        if frame.records and frame.records_outputs:
            self._record_outputs(module, frame, args, kwargs, result)

    def _record_outputs(
        self,
        module: nn.Module,
        frame: Frame,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        result: object,
    ) -> None:
        if not frame.records:
            return
        session, parent = self._session, self._parent(frame)
        if frame.at.microbatch is not None:
            uses.watch(session, module, frame.name, frame.at, tensors_of_call(args, kwargs), result)
            if frame.plain and session.clock.grad_enabled():
                self._watch_soles(module, frame, result)
        for slot, tensor in tensors_of_result(result):
            producers, meta = tuple(frame.inputs), frame.meta
            if frame.outputs:
                producers = session.producers.find(tensor)
                if not producers:
                    producers, meta = (*frame.inputs, *frame.outputs), _assumed(frame.meta)
            event = self._record(tensor, frame, slot, producers, meta, is_output=True)
            if event is not None and parent is not None:
                parent.outputs.append(event)

    def _watch_soles(self, module: nn.Module, frame: Frame, result: object) -> None:
        """Find out in backward which gradients this call alone brings, if it is no container."""
        targets, frame.watched = frame.watched, []
        if frame.outputs:
            return
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                targets.append((id(self._session.names.parameter(parameter)), parameter))
        if targets:
            self._session.soles.watch(result, targets)

    def innermost(self) -> Frame | None:
        """Return the recorded call that this thread is in the middle of."""
        return next((frame for frame in reversed(self._local.stack) if frame.records), None)

    def _scope(self) -> str:
        frame = self.innermost()
        if frame is None:
            return self._session.clock.replayed_scope()
        return "" if frame.name.startswith("(") else frame.name  # the root, and stages of a pipeline

    def unwind(self, frame: Frame) -> None:
        """Take a call off the stack, whether it returned, raised or was cut short; never fails."""
        stack = self._local.stack
        while stack:
            top = stack.pop()
            if top.opens_root:
                self._session.clock.root_ended()
                self._session.prelude.pass_ended()
            if top.rests:
                self._local.resting = False
            if top is frame:
                return

    def _parent(self, frame: Frame) -> Frame | None:
        stack = self._local.stack
        below = stack[: stack.index(frame)] if frame in stack else []
        return next((outer for outer in reversed(below) if outer.records), None)

    def _record_inputs(
        self,
        module: nn.Module,
        frame: Frame,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        is_root: bool,
    ) -> None:
        frame.meta = self._describe(module, frame)
        frame.plain = self._plain.note(module, frame.name)
        parent = self._parent(frame)
        given = tensors_of_call(args, kwargs)
        frame.places = self._places.of_inputs(module, frame.entered, given)
        if is_root and frame.entered == ROOT:
            for listener in self._session.on_root:
                listener(frame.at, given)
        later_stage = frame.entered != ROOT and self._session.names.is_stage(module)
        for slot, tensor in given if is_root and not later_stage else ():
            self._record_root_input(tensor, frame, slot)
        for slot, tensor in given:
            producers, meta = self._session.producers.find(tensor), frame.meta
            if not producers and parent is not None and (parent.outputs or parent.inputs):
                producers, meta = (*parent.inputs, *parent.outputs), _assumed(meta)
            event = self._record(tensor, frame, slot, producers, meta, is_output=False)
            if event is not None:
                frame.inputs.append(event)

    def _record_root_input(self, tensor: torch.Tensor, frame: Frame, slot: str) -> None:
        """Record what comes from outside; what recorded calls computed is an input of the main root only."""
        session = self._session
        if frame.entered != ROOT and session.producers.computed(tensor):
            return
        producers = session.producers.find(tensor)
        call = session.clock.take(frame.at, Kind.INPUT, frame.entered, slot)
        place = frame.places.get(slot)
        event = session.emit(
            tensor, frame.at, Kind.INPUT, frame.entered, slot,
            call=call.number, recompute=call.recompute, producers=producers, meta=frame.meta,
            spec=place.own if place is not None else None,
        )  # fmt: skip
        if event is not None:
            session.producers.add(tensor, event, is_output=False)

    def _record(
        self,
        tensor: torch.Tensor,
        frame: Frame,
        slot: str,
        producers: tuple[int, ...],
        meta: Meta,
        *,
        is_output: bool,
    ) -> int | None:
        session, at, name = self._session, frame.at, frame.left if is_output else frame.entered
        call = session.clock.take(at, Kind.ACTIVATION, name, slot)
        place = self._places.of_output(tensor, name, slot) if is_output else frame.places.get(slot)
        event = session.emit(
            tensor, at, Kind.ACTIVATION, name, slot,
            call=call.number, recompute=call.recompute, producers=producers, meta=meta,
            spec=place.own if place is not None else None,
        )  # fmt: skip
        frame.taken[slot] = Taken(call.number, place, event)
        if event is not None:
            session.producers.add(tensor, event, is_output=is_output)
        if tensor.requires_grad and session.clock.gradients_arrive(tensor) and at.microbatch is not None:
            own = place.gradient if place is not None else None
            total = not is_output and not is_own_input(tensor)
            self.grads.watch(tensor, at, name, slot, call.number, total=total, spec=own)
            if frame.plain and not is_output:
                frame.watched.append(((at, name, slot, call.number), tensor))
        return event

    def _describe(self, module: nn.Module, frame: Frame) -> Meta:
        return Meta(
            module=own_class(module).__name__,
            training=module.training,
            grad_enabled=self._session.clock.grad_enabled(),
            autocast=_autocast_dtype(module),
            op=COUPLES_ROWS if _couples_rows(module) else None,
            source=user_line(),
            text=COMPILED if frame.compiled else None,
        )


def _assumed(meta: Meta) -> Meta:
    return Meta(
        module=meta.module, training=meta.training, grad_enabled=meta.grad_enabled,
        autocast=meta.autocast, source=meta.source, op=meta.op, text=meta.text,
        assumed=True,
    )  # fmt: skip


def _couples_rows(module: nn.Module) -> bool:
    """Tell whether a row's output depends on the other rows of its rank's batch, as in batch norm."""
    if isinstance(module, nn.SyncBatchNorm) and module.training:
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or module.running_mean is None
    return module.training and {"running_mean", "running_var"} <= set(module._buffers.keys())


def _autocast_dtype(module: nn.Module) -> str | None:
    """Return the dtype that autocast uses on CUDA or CPU, or None where it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None
