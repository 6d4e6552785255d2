"""Records, for a tied parameter, the part of its gradient that comes from each module that uses it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.autograd.graph import Node

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.sole import CAST
from tensortrace.tracer.hooks.walk import tensors_of_result
from tensortrace.tracer.types import Kind

MAX_NODES = 64


def watch(
    session: Session,
    module: nn.Module,
    name: str,
    at: Moment,
    given: list[tuple[str, torch.Tensor]],
    result: object,
) -> None:
    """After a module's forward, watch the edges of its graph that lead to tied parameters of its own."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.requires_grad and _is_tied(session, parameter):
            stop = {tensor.grad_fn for _, tensor in given if tensor.grad_fn is not None}
            owner = weakref.ref(session.names.parameter(parameter))
            for node, index in _edges_to(parameter, result, stop):
                node.register_hook(_hook(session, owner, f"use.{name}", at, index))


def _is_tied(session: Session, parameter: torch.Tensor) -> bool:
    return bool(session.names.tensor(parameter).aliases)


def _edges_to(parameter: torch.Tensor, result: object, stop: set[Node]) -> Iterator[tuple[Node, int]]:
    """Yield (node, input number) of each edge from the module's graph to the parameter, or to its cast."""
    todo = deque(t.grad_fn for _, t in tensors_of_result(result) if t.grad_fn is not None)
    seen: set[Node] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.popleft()
        if node in seen or node in stop:
            continue
        seen.add(node)
        for index, (below, _) in enumerate(node.next_functions):
            if below is None:
                continue
            if _leads_to(below, parameter):
                yield node, index
            else:
                todo.append(below)


def _leads_to(node: Node, parameter: torch.Tensor) -> bool:
    if node.name() == CAST and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return getattr(node, "variable", None) is parameter


def _hook(
    session: Session, parameter: weakref.ref[torch.Tensor], slot: str, at: Moment, index: int
) -> Callable[[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]], None]:
    """Return a node hook; like every hook of ours it returns None, so that nothing is replaced."""

    def hook(inputs: tuple[torch.Tensor | None, ...], outputs: tuple[torch.Tensor | None, ...]) -> None:
        _record(session, parameter, slot, at, inputs[index])

    return hook


@guard("gradient per use")
def _record(
    session: Session,
    reference: weakref.ref[torch.Tensor],
    slot: str,
    at: Moment,
    gradient: torch.Tensor | None,
) -> None:
    parameter = reference()
    if session.muted or gradient is None or parameter is None:
        return
    name = session.names.tensor(parameter).name
    call = session.clock.ordinal_in(at, Kind.LOCAL_GRAD, name, slot)
    session.emit(gradient, at, Kind.LOCAL_GRAD, name, slot, call=call, parameter=parameter)
