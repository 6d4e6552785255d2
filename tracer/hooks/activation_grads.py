"""Records the gradient of each recorded activation, through hooks on the tensors themselves."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils.hooks import RemovableHandle

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import Spec
from tensortrace.tracer.types import SOLE, Kind, Meta, Shard

_TOTAL = Meta(total=True)
_SOLE = Meta(total=True, op=SOLE)
_OWN = Meta()


class GradHooks:
    """Hooks on activations; they hold names and numbers only, never the tensor.

    Hooks on leaves (a parameter given to a module) would outlive the graph, so they are removed when the
    next microbatch begins.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._on_leaves: list[RemovableHandle] = []
        self._fired: Counter[tuple[Moment, str, str]] = Counter()
        session.clock.on_open.append(self._begin_window)
        session.clock.on_divide.append(self._remove)
        session.patches.on_undo(self._remove)

    def watch(
        self,
        tensor: torch.Tensor,
        at: Moment,
        name: str,
        slot: str,
        call: int,
        *,
        total: bool,
        shard: Shard | None = None,
        spec: Spec | None = None,
        text: str | None = None,
    ) -> None:
        """Record the gradient that arrives at the tensor in any backward, under the activation's key.

        ``shard`` (or, in words, ``text``) is how the program says that the gradient lies, if it does;
        ``spec`` its place where a plain tensor is part of a DTensor.
        """
        if not tensor.requires_grad or not self._session.wants(Kind.ACTIVATION_GRAD, name, at):
            return
        if not tensor.is_leaf and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return
        self._fired[at, name, slot] = max(self._fired[at, name, slot], call + 1)
        meta = Meta(total=total, text=text) if text else _TOTAL if total else _OWN
        fired = False

        def hook(gradient: torch.Tensor) -> None:
            nonlocal fired
            if self._record(gradient, at, name, slot, None if fired else call, meta, shard, spec):
                fired = True

        handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    @guard("activation gradient")
    def _record(
        self,
        gradient: torch.Tensor | None,
        at: Moment,
        name: str,
        slot: str,
        call: int | None,
        meta: Meta,
        shard: Shard | None,
        spec: Spec | None,
    ) -> bool:
        """Record one gradient; a further backward through the same graph gets a call of its own.

        A compiled graph brings None to an output that the objective does not depend on.
        """
        staged = self._session.staged
        if gradient is None or self._session.muted or (staged is not None and staged.only_weights):
            return False
        if call is None:
            call = self._fired[at, name, slot]
            self._fired[at, name, slot] += 1
        if meta is _TOTAL and self._session.soles.is_sole((at, name, slot, call), gradient):
            meta = _SOLE
        self._session.emit(
            gradient, at, Kind.ACTIVATION_GRAD, name, slot,
            call=call, meta=meta, shard=shard, spec=spec,
        )  # fmt: skip
        return True

    def _begin_window(self) -> None:
        self._fired.clear()
        self._remove()

    def _remove(self) -> None:
        while self._on_leaves:
            self._on_leaves.pop().remove()
