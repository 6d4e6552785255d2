"""Records gradients after a reduction across ranks, by a wrapper or by the program's own collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import Wrapper
from tensortrace.tracer.types import Kind, Meta

NO_REDUCTION = "no reduction across ranks was seen"


class Reductions:
    """Knows which wrappers will reduce in the coming backward, and records the outcome."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due: dict[int, tuple[weakref.ref[nn.Module], Wrapper]] = {}
        self._seen = False
        session.sink.absent(Kind.REDUCED_GRAD, NO_REDUCTION)
        session.on_wrapper.append(self._wrapper_called)
        session.after_backward.append(self._after_backward)

    def record(self, parameters: Iterable[torch.Tensor], *, op: str, ranks: tuple[int, ...]) -> None:
        """Record ``.grad`` of these parameters as reduced over the ranks by ``op``."""
        session, at = self._session, self._session.clock.backward_moment()
        if not self._seen:
            self._seen = True
            session.sink.absent(Kind.REDUCED_GRAD, None)
        meta = Meta(op=op, ranks=ranks)
        for parameter in parameters:
            if parameter.grad is not None:
                name = session.names.tensor(parameter).name
                call = session.clock.ordinal(Kind.REDUCED_GRAD, name)
                session.emit(
                    parameter.grad, at, Kind.REDUCED_GRAD, name, "grad",
                    call=call, meta=meta, parameter=parameter,
                )  # fmt: skip

    def _wrapper_called(self, wrapper: Wrapper, module: nn.Module) -> None:
        if wrapper.reduces_backward(module):
            self._due[id(module)] = (weakref.ref(module), wrapper)
        elif torch.is_grad_enabled():
            self._due.pop(id(module), None)

    def _after_backward(self) -> None:
        due, self._due = self._due, {}
        for key, (reference, wrapper) in due.items():
            module = reference()
            if module is None:
                continue
            parameters = wrapper.reduced_parameters(module)
            if not self._session.backward_reached(parameters):
                self._due[key] = (reference, wrapper)
                continue
            layout = wrapper.layout(module)
            self.record(parameters, op=layout.op, ranks=layout.mesh.ranks)
