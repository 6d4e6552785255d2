"""Records gradients after a reduction across ranks, by a wrapper or by the program's own collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from tensortrace.tracer.hooks.gradients import Gradients
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import Wrapper, local_part
from tensortrace.tracer.types import Kind, Meta

NO_REDUCTION = "no reduction across ranks was seen"


@dataclass(slots=True)
class _Unclaimed:
    """What was reduced since the last backward in memory that is no gradient's: copies of some, perhaps."""

    numel: int = 0
    op: str = ""
    ranks: tuple[int, ...] = ()


class Reductions:
    """Knows which wrappers will reduce in the coming backward, and records the outcome.

    A program may also flatten its gradients into a buffer, reduce that and copy back. The copies can't be
    traced; but where at least as many elements were reduced as the gradients have, and no gradient was
    reduced in place, the gradients are recorded as reduced when something next reads them (``settle``).
    """

    def __init__(self, session: Session, gradients: Gradients) -> None:
        self._session = session
        self._gradients = gradients
        self._unclaimed = _Unclaimed()
        self._due: dict[int, tuple[weakref.ref[nn.Module], Wrapper]] = {}
        self._seen = False
        session.sink.absent(Kind.REDUCED_GRAD, NO_REDUCTION)
        session.on_wrapper.append(self._wrapper_called)
        session.after_backward.append(self._after_backward)

    def collective_ended(self, tensors: list[torch.Tensor], *, op: str, ranks: tuple[int, ...]) -> None:
        """Note that the program itself reduced these tensors, in place, over the ranks."""
        if self._session.quiet and self._seen:
            return
        inside_backward = self._session.clock.is_recompute()
        if not inside_backward and not self._session.clock.backward_ran:
            return
        reduced = _sharing_memory(self._gradients.parameters(), tensors)
        if reduced:
            self._unclaimed = _Unclaimed()
            self.record(reduced, op=op, ranks=ranks)
            return
        if inside_backward:
            return
        numel = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        self._unclaimed = _Unclaimed(self._unclaimed.numel + numel, op, ranks)

    def settle(self) -> None:
        """Record gradients that were reduced through copies; called before a clip, an unscale or a step."""
        unclaimed, self._unclaimed = self._unclaimed, _Unclaimed()
        if not unclaimed.numel:
            return
        graded = [parameter for parameter in self._gradients.parameters() if parameter.grad is not None]
        if graded and unclaimed.numel >= sum(parameter.numel() for parameter in graded):
            self.record(graded, op=unclaimed.op, ranks=unclaimed.ranks)

    def record(self, parameters: Iterable[torch.Tensor], *, op: str, ranks: tuple[int, ...]) -> None:
        """Record ``.grad`` of these parameters as reduced over the ranks by ``op``."""
        session, at = self._session, self._session.clock.backward_moment()
        if not self._seen:
            self._seen = True
            session.sink.absent(Kind.REDUCED_GRAD, None)
        if session.quiet:
            return
        meta, parameters = Meta(op=op, ranks=ranks), list(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                name = session.names.tensor(parameter).name
                call = session.clock.ordinal(Kind.REDUCED_GRAD, name)
                session.emit(
                    parameter.grad, at, Kind.REDUCED_GRAD, name, "grad",
                    call=call, meta=meta, parameter=parameter,
                )  # fmt: skip
        for listener in session.on_reduced:
            listener(parameters)

    def reduced_in(self, module: nn.Module) -> None:
        """Record what the wrappers in a module have reduced outside of any backward, as in pipelines."""
        inside = {id(part) for part in module.modules()}
        for key, (reference, wrapper) in list(self._due.items()):
            found = reference()
            parameters = wrapper.reduced_parameters(found) if found is not None and key in inside else []
            layout = wrapper.layout(found) if parameters and found is not None else None
            if layout is not None:
                del self._due[key]
                self.record(parameters, op=layout.op, ranks=layout.mesh.ranks)

    def _wrapper_called(self, wrapper: Wrapper, module: nn.Module) -> None:
        if wrapper.reduces_backward(module):
            self._due[id(module)] = (weakref.ref(module), wrapper)
        elif torch.is_grad_enabled():
            self._due.pop(id(module), None)

    def _after_backward(self) -> None:
        self._unclaimed = _Unclaimed()
        if self._session.quiet:
            return
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
            if layout is None:
                continue
            self.record(parameters, op=layout.op, ranks=layout.mesh.ranks)


def _sharing_memory(parameters: Iterable[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters whose ``.grad`` has bytes in common with one of the tensors."""
    spans = [_span(tensor) for tensor in tensors]
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            first, last = _span(parameter.grad)
            if any(start < last and first < end for start, end in spans):
                found.append(parameter)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor's elements lie between."""
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()
