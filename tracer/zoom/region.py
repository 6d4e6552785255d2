"""Records the operations of one module call: what each was given and returned, what gradient came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tensortrace.tracer.copies import unobserved, unsupported
from tensortrace.tracer.hooks.clock import Call, Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.modules import Modules
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.source import user_places
from tensortrace.tracer.hooks.walk import tensors_in, tensors_of_result
from tensortrace.tracer.placements import split
from tensortrace.tracer.types import Kind, Meta
from tensortrace.tracer.zoom import describing
from tensortrace.tracer.zoom.origins import Origin, Origins

MAX_OPERATIONS = 100_000
"""Operations of one call that are recorded; what comes after is left out, as the last one's text says."""


@dataclass(frozen=True, slots=True)
class Started:
    """An operation that is running: its number and name, what the trace says of it, what it comes from."""

    prefix: str
    reference: str
    meta: Meta
    producers: tuple[int, ...]
    written: list[torch.Tensor]
    is_view: bool
    is_silent: bool
    is_collective: bool


class Region:
    """One call of a module that is looked into; used on one thread, and done when the call returns.

    Nothing here outlives the call but hooks on tensors, which hold names and numbers only.
    """

    def __init__(self, session: Session, modules: Modules, *, at: Moment, name: str, call: Call) -> None:
        self._session = session
        self._modules = modules
        self._at = at
        self._name = name
        self._call = call
        self._origins = Origins()
        self._hooked: set[str] = set()
        self._count = 0

    @guard("operation inputs")
    def began(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Started | None:
        """Record what an operation is given from outside of the call, before it can be overwritten."""
        if self._count >= MAX_OPERATIONS:
            return None
        with unobserved():
            return self._began(func, args, kwargs)

    def _began(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Started:
        number, name = self._count, describing.short_name(func)
        self._count += 1
        prefix = f"{number:05d}.{name}"
        arguments = describing.named(func, args, kwargs)
        tensors = [
            t for _, value in arguments for t in describing.leaves(value) if isinstance(t, torch.Tensor)
        ]
        meta, requires_grad = self._meta(func), any(t.requires_grad for t in tensors)
        events: dict[int, None] = {}
        references: dict[int, str] = {}
        for place, tensor in enumerate(tensors):
            event, reference = self._input(tensor, f"{prefix}.in.{place}", meta)
            references[id(tensor)] = reference
            if event is not None:
                events[event] = None
        texts = tuple(
            f"{key}={describing.text(value, lambda t: references[id(t)])}" for key, value in arguments
        )
        return Started(
            prefix=prefix,
            reference=f"#{number}",
            meta=_with(meta, texts, requires_grad and torch.is_grad_enabled()),
            producers=tuple(events),
            written=describing.written(func, args, kwargs),
            is_view=describing.is_view(func),
            is_silent=describing.is_silent(func),
            is_collective=describing.is_collective(func),
        )

    def _meta(self, func: Any) -> Meta:
        places, frame = user_places(), self._modules.innermost()
        called = [places[0].function, *map(str, places[1:])] if places else []
        return Meta(
            op=describing.name_of(func),
            source=places[0].line if places else None,
            text=describing.CALLED_AT.join(called) or None,
            module=self._name if frame is None else frame.name,
            grad_enabled=torch.is_grad_enabled(),
        )

    def _input(self, tensor: torch.Tensor, slot: str, meta: Meta) -> tuple[int | None, str]:
        """Return the event and the reference of what an operation is given, recording what is new here."""
        origin = self._origins.find(tensor)
        if origin is not None:
            self._watch(tensor, origin)
            return origin.event, origin.reference + _kind_of(tensor)
        producers = self._origins.around(tensor) or self._session.producers.find(tensor)
        event = self._emit(tensor, slot, producers, meta)
        self._origins.add(tensor, event, slot, slot, external=True)
        return event, slot + _kind_of(tensor)

    @guard("operation outputs")
    def ended(self, started: Started, result: object) -> None:
        """Record what an operation returned or wrote, before the next one can overwrite it."""
        with unobserved():
            self._ended(started, result)

    def _ended(self, started: Started, result: object) -> None:
        found = tensors_of_result(result)
        known = {id(tensor) for _, tensor in found}
        rest = [tensor for tensor in started.written if id(tensor) not in known]
        found += [item for i, tensor in enumerate(rest) for item in tensors_in(tensor, f"written.{i}")]
        if started.is_collective and started.is_silent:
            for _, tensor in found:
                self._origins.forget(tensor)
            found = []
        recorded = False
        changed = {id(tensor) for tensor in started.written}
        for slot, tensor in found:
            full = f"{started.prefix}.{slot}"
            event = None if started.is_silent else self._emit(tensor, full, started.producers, started.meta)
            recorded = recorded or event is not None
            self._origins.add(
                tensor, event, full, started.reference + slot.removeprefix("out"),
                cut=".detach" in (started.meta.op or ""),
                anew=not started.is_view and (id(tensor) in changed or not started.written),
            )  # fmt: skip
        if not recorded:
            nothing = torch.empty(0, dtype=found[0][1].dtype if found else torch.uint8)
            self._emit(nothing, f"{started.prefix}.none", started.producers, started.meta)

    @guard("operations of a call")
    def returned(self, result: object) -> None:
        """Watch the gradients of what the call returned, and let go of everything else."""
        with unobserved():
            self._returned(result)
        self._origins.clear()

    def _returned(self, result: object) -> None:
        found = tensors_of_result(result)
        origins = [(slot, tensor, self._origins.find(tensor)) for slot, tensor in found]
        for _, tensor, origin in origins:
            if origin is not None:
                self._watch(tensor, origin)
        texts = [
            f"{slot}={'?' if origin is None else origin.reference}{_kind_of(tensor)}"
            for slot, tensor, origin in origins
        ]
        events = [origin.event for _, _, origin in origins if origin is not None]
        meta = Meta(op=describing.RETURN, module=self._name, arguments=tuple(texts))
        producers = tuple(dict.fromkeys(event for event in events if event is not None))
        self._emit(torch.empty(0), f"{self._count:05d}.return.none", producers, meta)

    def _emit(self, tensor: torch.Tensor, slot: str, producers: tuple[int, ...], meta: Meta) -> int | None:
        local, _ = split(tensor)
        if unsupported(local):
            return None
        return self._session.emit(
            tensor, self._at, Kind.OPERATION, self._name, slot,
            call=self._call.number, recompute=self._call.recompute, producers=producers, meta=meta,
        )  # fmt: skip

    def _watch(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Record the gradient that arrives at an operation's result, once.

        Results have no place in autograd's graph while the mode sees them; they have one when another
        operation, or the caller, is given them.
        """
        if not tensor.requires_grad or tensor.is_leaf or origin.slot in self._hooked:
            return
        if origin.cut or origin.external:
            return
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            return
        session, at, name, slot, call = self._session, self._at, self._name, origin.slot, self._call
        with torch.enable_grad():  # it is given to a custom autograd function, which computes without
            arrives = session.clock.gradients_arrive(tensor)
        if not arrives or not session.wants(Kind.OPERATION_GRAD, name, at):
            return
        self._hooked.add(slot)
        fired = False

        def hook(gradient: torch.Tensor) -> None:
            nonlocal fired
            if not fired:
                fired = True
                _gradient(session, gradient, at, name, slot, call.number)

        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


@guard("operation gradient")
def _gradient(
    session: Session, gradient: torch.Tensor | None, at: Moment, name: str, slot: str, call: int
) -> None:
    if gradient is not None and not session.muted and not unsupported(split(gradient)[0]):
        session.emit(gradient, at, Kind.OPERATION_GRAD, name, slot, call=call, meta=Meta())


def _with(meta: Meta, arguments: tuple[str, ...], requires_grad: bool) -> Meta:
    return Meta(
        op=meta.op, source=meta.source, text=meta.text, module=meta.module, grad_enabled=meta.grad_enabled,
        requires_grad=requires_grad, arguments=arguments,
    )  # fmt: skip


def _kind_of(tensor: torch.Tensor) -> str:
    """Return `` float32[2,4] grad``: what a reference refers to, and whether gradients flow to it."""
    flows = f" {describing.FLOWS}" if tensor.requires_grad else ""
    return f" {str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]{flows}"
