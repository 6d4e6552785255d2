"""Records each rank's own contribution to a parameter's gradient, before any reduction across ranks."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.hooks import RemovableHandle

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.after_hooks import AfterHooks
from tensortrace.tracer.hooks.guard import guard, on_retire
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import Spec, split
from tensortrace.tracer.types import SOLE, Kind, Meta

_SOLE = Meta(op=SOLE)


class Gradients:
    """Hooks on parameters, and this recorder's own sum of what they saw in the window.

    The sum can't be read from ``.grad``, which may hold leftovers or parts that were reduced already, and
    whether a second backward follows the first isn't known in advance. So each window costs one copy of
    the gradients (float32, or float64 for float64) on the parameters' device, from the first backward until
    the first optimizer step.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooked: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        self._sums: dict[int, tuple[torch.Tensor | None, Spec | None]] = {}
        self._window_began = False
        session.clock.on_open.append(self._open)
        session.patches.on_undo(self._unhook)
        on_retire(self._unhook)
        session.on_backward.append(self._before_backward)
        self._after_hooks = AfterHooks(session)
        session.after_backward.append(self._after_hooks.backward_ended)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each trainable parameter of the known modules and of the optimizers once."""
        seen: set[int] = set()
        for parameter in self._candidates():
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def emit_sums(self, only: Iterable[torch.Tensor] | None = None) -> None:
        """Record the window's sums, of all parameters or of the given ones, and begin new ones."""
        if not self._sums:
            return
        chosen = set(self._sums) if only is None else {id(parameter) for parameter in only}
        session, at = self._session, self._session.clock.window()
        for parameter in self.parameters():
            found = self._sums.pop(id(parameter), None) if id(parameter) in chosen else None
            total, spec = found or (None, None)
            if total is not None:
                name = session.names.tensor(parameter).name
                call = session.clock.take(at, Kind.LOCAL_GRAD, name, "grad").number
                session.emit(
                    total, at, Kind.LOCAL_GRAD, name, "grad", call=call, parameter=parameter, spec=spec
                )

    def close_window(self) -> None:
        """Record what no optimizer step has asked for, and forget the rest."""
        self.emit_sums()
        self._sums.clear()

    def _candidates(self) -> Iterator[torch.Tensor]:
        for parameter, _ in self._session.names.parameters():
            yield parameter
        for optimizer in self._session.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        yield from self._session.flats.whole()

    def _open(self) -> None:
        self._window_began = False
        if self._session.quiet:
            self._unhook()
        else:
            self._hooked = {key: known for key, known in self._hooked.items() if known[0]() is not None}

    def _unhook(self) -> None:
        while self._hooked:
            _, (_, handle) = self._hooked.popitem()
            handle.remove()

    def _before_backward(self) -> None:
        session, at = self._session, self._session.clock.window()
        session.arrived.clear()
        first, self._window_began = not self._window_began, True
        for parameter in self.parameters():
            self._hook(parameter, parameter)
            beside = len(session.flats.inside(parameter)) > 1  # the optimizer has the parameters inside
            if first and parameter.grad is not None and not beside:
                name = session.names.tensor(parameter).name
                session.emit(parameter.grad, at, Kind.LOCAL_GRAD, name, "start", parameter=parameter)
        for whole, parameter in session.names.stand_ins():
            if whole.requires_grad and whole.is_leaf:
                self._hook(whole, parameter)

    def _hook(self, leaf: torch.Tensor, parameter: torch.Tensor) -> None:
        """Watch the leaf at which the parameter's gradient arrives: itself, or what stands in for it."""
        known = self._hooked.get(id(leaf))
        if known is None or known[0]() is not leaf:
            handle = leaf.register_hook(self._hook_for(weakref.ref(parameter)))  # type: ignore[no-untyped-call]
            self._hooked[id(leaf)] = weakref.ref(leaf), handle
            _put_first(leaf, handle.id)
        self._after_hooks.watch(leaf, parameter)

    def _hook_for(self, parameter: weakref.ref[torch.Tensor]) -> Callable[[torch.Tensor], None]:
        """Return a hook that holds the parameter weakly: one that held it would keep it for ever."""

        def hook(gradient: torch.Tensor) -> None:
            self._arrived(parameter, gradient)

        return hook

    @guard("local gradient")
    def _arrived(self, reference: weakref.ref[torch.Tensor], gradient: torch.Tensor | None) -> None:
        session, parameter = self._session, reference()
        if session.muted or gradient is None or parameter is None:
            return
        session.arrived.update((id(parameter), *session.flats.inside(parameter)))
        at, name = session.clock.backward_moment(), session.names.tensor(parameter).name
        if not session.wants(Kind.LOCAL_GRAD, name, at, parameter):
            return
        call = session.clock.ordinal_in(at, Kind.LOCAL_GRAD, name)
        sole = _SOLE if session.soles.is_sole(id(parameter), gradient) else None
        session.emit(gradient, at, Kind.LOCAL_GRAD, name, "grad", call=call, meta=sole, parameter=parameter)
        self._after_hooks.arrived(parameter, gradient, at, call)
        local, spec = split(gradient)
        with unobserved():
            self._accumulate(id(parameter), local.detach(), spec)

    def _accumulate(self, key: int, gradient: torch.Tensor, spec: Spec | None) -> None:
        """Add this rank's part; parts that lie differently have no sum that a rank could make alone."""
        if key not in self._sums:
            self._sums[key] = gradient.to(_sum_dtype(gradient.dtype), copy=True), spec
            return
        total, known = self._sums[key]
        if total is None or known != spec:
            self._sums[key] = None, spec
        elif total.layout is gradient.layout:
            total.add_(gradient)
        else:
            self._sums[key] = total.to_dense() + gradient.to_dense(), spec


def _put_first(parameter: torch.Tensor, hook: int) -> None:
    """Let our hook see the gradient before hooks of the program, which may reduce or replace it.

    Autograd goes through the underlying dict in order of insertion, which ``move_to_end`` doesn't change.
    """
    hooks = parameter._backward_hooks
    if isinstance(hooks, OrderedDict) and hook in hooks:
        others = [(key, value) for key, value in hooks.items() if key != hook]
        for key, _ in others:
            del hooks[key]
        hooks.update(others)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex or dtype is torch.float64:
        return dtype
    return torch.float32
