"""Records the tensors that the program names itself, and their gradients."""

from __future__ import annotations

import torch

from tensortrace.tracer import explicit
from tensortrace.tracer.explicit import STATES, Lies
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.modules import Modules
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.source import user_line
from tensortrace.tracer.mesh import name as mesh_name
from tensortrace.tracer.types import Kind, Meta, Shard

SLOT = "out"


class Named:
    """Receives what ``tracer.boundary`` is given."""

    def __init__(self, session: Session, modules: Modules) -> None:
        self._session = session
        self._modules = modules

    def install(self) -> None:
        """Let the program's calls come here, until the recording is removed."""
        explicit.receivers.append(self.receive)
        self._session.patches.on_undo(lambda: explicit.receivers.remove(self.receive))

    @guard("named boundary")
    def receive(self, name: str, tensor: object, lies: Lies) -> None:
        """Record one tensor where the running forward stands."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"boundary {name!r} was given a {type(tensor).__name__}, not a tensor")
        session, frame, at = self._session, self._modules.innermost(), self._session.clock.forward_moment()
        self._declare(lies)
        shard, text = _said(lies.value)
        scope = session.scope()
        name = f"{scope}.{name}" if scope else name
        call = session.clock.take(at, Kind.ACTIVATION, name, SLOT)
        meta = Meta(
            grad_enabled=session.clock.grad_enabled(),
            source=user_line(),
            text=text,
        )
        event = session.emit(
            tensor, at, Kind.ACTIVATION, name, SLOT, call=call.number, recompute=call.recompute,
            producers=session.producers.find(tensor), meta=meta, shard=shard,
        )  # fmt: skip
        if event is not None:
            session.producers.add(tensor, event, is_output=True)
            if frame is not None:
                frame.outputs.append(event)
        if at.microbatch is not None and session.clock.gradients_arrive(tensor):
            shard, text = _said(lies.grad)
            self._modules.grads.watch(
                tensor, at, name, SLOT, call.number, total=False, shard=shard, text=text
            )

    def _declare(self, lies: Lies) -> None:
        if lies.mesh is None:
            return
        for layout in (lies.value, lies.grad):
            if layout is not None:
                key = layout.mesh if isinstance(layout, Shard) else mesh_name(lies.mesh, 0)
                self._session.sink.mesh(key, lies.mesh)


def _said(layout: str | Shard | None) -> tuple[Shard | None, str | None]:
    """Return what the program says of a layout as a Shard, or in words for the reader of the trace."""
    return (None, STATES + layout) if isinstance(layout, str) else (layout, None)
