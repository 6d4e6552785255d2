"""Records each clipping of gradients: before, after, norm and the factor applied."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.guard import guard, is_armed
from tensortrace.tracer.hooks.imports import when_imported
from tensortrace.tracer.hooks.patches import Patches
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import Spec, fsdp, split
from tensortrace.tracer.types import Kind, Meta

EVENT = "(clip)"
TORCHS_EPSILON = 1e-6
"""What ``clip_grad_norm_`` adds to the norm before it divides."""

OF_NORM = ("total_norm", "coefficient")

Clip = Callable[..., Any]


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0


class Clipping:
    """One kind of clip function; ``limit`` names its argument that bounds the gradients."""

    def __init__(self, session: Session, local: _Local, name: str, limit: str) -> None:
        self._session = session
        self._local = local
        self._name = name
        self._limit = limit

    def wrap(self, original: Clip) -> Clip:
        """Return the function with its outermost calls recorded."""

        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._local.depth or not is_armed():
                return original(parameters, *args, **kwargs)
            parameters, again = _listed(parameters)
            call = self._before(parameters)
            self._local.depth += 1
            try:
                result = original(again, *args, **kwargs)
            finally:
                self._local.depth -= 1
            self._after(parameters, call, args, kwargs, result)
            return result

        return clip

    @guard("clip: before")
    def _before(self, parameters: list[torch.Tensor]) -> int | None:
        self._session.gradients_read()
        if self._session.quiet:
            return None
        call = self._session.clock.ordinal(Kind.CLIPPED_GRAD, EVENT)
        self._gradients(parameters, "before", call)
        return call

    @guard("clip: after")
    def _after(
        self,
        parameters: list[torch.Tensor],
        call: int | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: object,
    ) -> None:
        if call is None:
            return
        self._gradients(parameters, "grad", call)
        session, at = self._session, self._session.clock.backward_moment()
        names = tuple(session.flats.names(p for p in parameters if p.grad is not None))
        meta = Meta(op=self._name, members=names)
        numbers, spec = self._numbers(args, kwargs, result)
        for slot, tensor in numbers.items():
            own = spec if slot in OF_NORM else None
            session.emit(tensor, at, Kind.CLIPPED_GRAD, EVENT, slot, call=call, meta=meta, spec=own)

    def _gradients(self, parameters: list[torch.Tensor], slot: str, call: int) -> None:
        session, at = self._session, self._session.clock.backward_moment()
        for parameter in parameters:
            if parameter.grad is not None:
                name = session.names.tensor(parameter).name
                session.emit(
                    parameter.grad, at, Kind.CLIPPED_GRAD, name, slot, call=call, parameter=parameter
                )

    def _numbers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> tuple[dict[str, torch.Tensor], Spec | None]:
        """Return the numbers of the event, in float64, without waiting for a device, and the norm's place.

        The norm of DTensors may be a part whose reduction the program has left to the clip; then no rank
        knows the factor here.
        """
        limit, spec = args[0] if args else kwargs[self._limit], None
        with unobserved():
            numbers = {"max_norm": _number(limit)}
            if self._name == "clip_grad_value_":
                return numbers, None
            norm = result if isinstance(result, torch.Tensor) else self._given_norm(args, kwargs)
            if norm is not None:
                norm, spec = split(norm)
                numbers["total_norm"] = norm.detach().to(torch.float64)
                if spec is None or spec.replicated:
                    factor = torch.clamp(limit / (norm.detach() + TORCHS_EPSILON), max=1.0)
                    numbers["coefficient"] = factor.to(torch.float64)
            if self._name == "clip_grad_norm_":
                kind = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
                numbers["norm_type"] = _number(kind)
            return numbers, spec

    def _given_norm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        norm = args[1] if len(args) > 1 else kwargs.get("total_norm")
        return norm if isinstance(norm, torch.Tensor) else None


def install(session: Session) -> None:
    """Wrap torch's clip functions under all their names."""
    local = _Local()
    for function, name, limit in (
        (clip_grad.clip_grad_norm_, "clip_grad_norm_", "max_norm"),
        (clip_grad._clip_grads_with_norm_, "clip_grads_with_norm_", "max_norm"),
        (clip_grad.clip_grad_value_, "clip_grad_value_", "clip_value"),
    ):
        session.patches.function(function, Clipping(session, local, name, limit).wrap(function))
    own = Clipping(session, local, "clip_grad_norm_", "max_norm")
    when_imported(session.patches, fsdp.MODULE, lambda module: _watch_method(own, session.patches))


def _watch_method(clipping: Clipping, patches: Patches) -> None:
    """Watch the method by which a wrapper clips the gradients that it has spread over ranks."""
    owner = fsdp.fsdp_class()
    if owner is None or not hasattr(owner, "clip_grad_norm_"):
        return
    original = owner.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        clip = clipping.wrap(lambda _, *given, **named: original(module, *given, **named))
        return clip(list(module.parameters()), *args, **kwargs)

    patches.attribute(owner, "clip_grad_norm_", clip_grad_norm_)


def _listed(parameters: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the parameters as a list, and what to hand on: a generator can be read only once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters], parameters
    listed = list(parameters)
    again = (p for p in listed) if isinstance(parameters, types.GeneratorType) else listed
    return listed, again


def _number(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float64)
    return torch.tensor(float(value), dtype=torch.float64)
