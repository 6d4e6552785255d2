"""Records what tensor hooks of the program leave of a parameter's gradient, where they change it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.types import Kind

_OF_THE_RECORDER = 1
"""Tensor hooks that a parameter has because it is recorded."""


class _Arrived(NamedTuple):
    """A gradient before the program's hooks see it: which it is, and what tells whether they change it."""

    gradient: torch.Tensor
    version: int
    collectives: int
    at: Moment
    call: int


class AfterHooks:
    """Looks again where autograd accumulates a gradient: all tensor hooks have run then.

    Only parameters with hooks of the program are watched, for one backward. The gradient itself is held from
    the first look to the second, so that another tensor cannot be taken for it; it is let go before autograd
    decides whether it may keep the tensor as ``.grad``. Hooks that call a collective reduce across ranks,
    perhaps still do: what they leave is no part of this rank's, and isn't recorded.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrived: dict[int, _Arrived] = {}
        self._watched: dict[int, tuple[Any, Any]] = {}
        self._with_hooks: set[int] = set()

    def watch(self, leaf: torch.Tensor, parameter: torch.Tensor) -> None:
        """Before a backward: watch the node that accumulates a leaf's gradient, if the program has hooks."""
        hooks = leaf._backward_hooks
        if hooks is None or len(hooks) <= _OF_THE_RECORDER or id(leaf) in self._watched:
            return
        with unobserved():
            node = get_gradient_edge(leaf).node
        handle = node.register_prehook(self._hook(weakref.ref(parameter)))
        self._with_hooks.add(id(parameter))
        self._watched[id(leaf)] = node, handle  # the node is kept: autograd makes another once it is gone

    def arrived(self, parameter: torch.Tensor, gradient: torch.Tensor, at: Moment, call: int) -> None:
        """Note a gradient that no hook of the program has seen yet."""
        if id(parameter) in self._with_hooks:  # of others a reference would make autograd copy the gradient
            self._arrived[id(parameter)] = _Arrived(
                gradient, gradient._version, self._session.collectives, at, call
            )

    def backward_ended(self) -> None:
        """Let go of everything that belongs to a backward."""
        for _, handle in self._watched.values():
            handle.remove()
        self._watched.clear()
        self._with_hooks.clear()
        self._arrived.clear()

    def _hook(self, parameter: weakref.ref[torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], None]:
        def hook(gradients: tuple[torch.Tensor, ...]) -> None:
            self._left(parameter, gradients)

        return hook

    @guard("after tensor hooks")
    def _left(self, reference: weakref.ref[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> None:
        session, parameter = self._session, reference()
        known = self._arrived.pop(id(parameter), None)
        left = gradients[0] if gradients else None
        if parameter is None or known is None or left is None or session.muted:
            return
        unchanged = left is known.gradient and left._version == known.version
        if unchanged or session.collectives != known.collectives:
            return
        name = session.names.tensor(parameter).name
        session.emit(
            left, known.at, Kind.LOCAL_GRAD, name, "hooked", call=known.call, parameter=parameter
        )  # fmt: skip
