"""Notices each backward: where it starts from, when it begins and when it has ended."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks import handwritten
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.optimizer_depth import inside_optimizer
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.types import Kind, Meta

NAME = "backward"


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0


def install(session: Session) -> None:
    """Wrap ``torch.autograd.backward``, which ``Tensor.backward`` calls too, and ``torch.autograd.grad``."""
    local = _Local()
    _install_backward(session, local)
    _install_grad(session, local)


def _install_backward(session: Session, local: _Local) -> None:
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or _is_nested(local):
            return original(tensors, *args, **kwargs)
        tensors = tensors if _is_root(tensors) else tuple(tensors)
        _around(session, local, _roots(tensors), lambda: original(tensors, *args, **kwargs))

    session.patches.function(original, backward)


def _install_grad(session: Session, local: _Local) -> None:
    """Take a ``grad`` with respect to parameters for a backward; any other is a side computation."""
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_nested(local):
            return original(outputs, inputs, *args, **kwargs)
        outputs = outputs if _is_root(outputs) else tuple(outputs)
        inputs = inputs if _is_root(inputs) else tuple(inputs)
        wanted = _roots(inputs)
        if session.staged or (wanted and _all_parameters(session, wanted)):
            return _around(
                session, local, _roots(outputs), lambda: original(outputs, inputs, *args, **kwargs)
            )
        return _muted(session, local, lambda: original(outputs, inputs, *args, **kwargs))

    session.patches.function(original, grad)


def _is_nested(local: _Local) -> bool:
    return local.depth > 0 or torch._C._current_graph_task_id() >= 0


def _around(session: Session, local: _Local, roots: list[torch.Tensor], run: Callable[[], Any]) -> Any:
    _begin(session, roots)
    del roots
    local.depth += 1
    try:
        return run()
    finally:
        local.depth -= 1
        _end(session)


def _muted(session: Session, local: _Local, run: Callable[[], Any]) -> Any:
    """Run a side computation (a gradient penalty): its gradients aren't those of the objective."""
    local.depth += 1
    session.muted += 1
    try:
        return run()
    finally:
        session.muted -= 1
        local.depth -= 1


def _is_root(tensors: object) -> bool:
    return isinstance(tensors, (torch.Tensor, GradientEdge))


def _roots(tensors: Any) -> list[torch.Tensor]:
    every: Iterable[object] = (tensors,) if _is_root(tensors) else tensors
    return [tensor for tensor in every if isinstance(tensor, torch.Tensor)]


@guard("autograd.grad")
def _all_parameters(session: Session, tensors: list[torch.Tensor]) -> bool:
    return all(session.names.known(tensor) is not None for tensor in tensors)


@guard("backward")
def _begin(session: Session, roots: list[torch.Tensor]) -> None:
    """Record what backward starts from, then let the other sources look before it runs."""
    session.clock.backward_began(inside_optimizer=inside_optimizer())
    if session.quiet:
        return
    at = session.clock.backward_moment()
    for root in roots if session.staged is None or session.staged.from_loss else ():
        call = session.clock.take(at, Kind.LOSS, NAME, "value").number
        producers = session.producers.find(root)
        session.emit(root, at, Kind.LOSS, NAME, "value", call=call, producers=producers, meta=Meta())
        with unobserved():
            handwritten.find_losses(session, root)
    for listener in session.on_backward:
        listener()


@guard("after backward")
def _end(session: Session) -> None:
    session.clock.backward_ended()
    for listener in session.after_backward:
        listener()
