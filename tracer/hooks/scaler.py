"""Records gradients after the loss scale is divided out, the scale itself, and steps it skips."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.order import Order
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.types import Kind

NO_SCALER = "no GradScaler was used"


class _Local(threading.local):
    def __init__(self) -> None:
        self.stepping: list[tuple[GradScaler, Optimizer]] = []
        self.stepped = False


class Scalers:
    """Watches every GradScaler; ``on_skip`` is called with the optimizer whose step one skipped."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._order: Order[GradScaler] = Order()
        self._local = _Local()
        self._unscaled = False
        self.on_skip: list[Callable[[Optimizer], None]] = []
        session.sink.absent(Kind.UNSCALED_GRAD, NO_SCALER)

    def install(self) -> None:
        """Wrap construction, ``unscale_`` and ``step``; ``step`` calls ``unscale_`` itself where needed."""
        scalers, patches = self, self._session.patches
        original_init, original_unscale, original_step = (
            GradScaler.__init__, GradScaler.unscale_, GradScaler.step,
        )  # fmt: skip

        @functools.wraps(original_init)
        def __init__(self: GradScaler, *args: Any, **kwargs: Any) -> None:
            original_init(self, *args, **kwargs)
            scalers._number(self)

        @functools.wraps(original_unscale)
        def unscale_(self: GradScaler, optimizer: Optimizer) -> None:
            scalers._before_unscale()
            original_unscale(self, optimizer)
            scalers._after_unscale(self, optimizer)

        @functools.wraps(original_step)
        def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            scalers._begin(self, optimizer)
            try:
                result = original_step(self, optimizer, *args, **kwargs)
                scalers._finish(self, optimizer)
            finally:
                scalers._unwind(self)
            return result

        patches.attribute(GradScaler, "__init__", __init__)
        patches.attribute(GradScaler, "unscale_", unscale_)
        patches.attribute(GradScaler, "step", step)

    def record(self) -> None:
        """Record the scale in force; called when an update begins or is skipped."""
        self._local.stepped = True
        session, at = self._session, self._session.clock.window()
        for scaler, _ in self._local.stepping[-1:] if not session.quiet else ():
            scale = getattr(scaler, "_scale", None)  # get_scale() would wait for the device
            if scaler.is_enabled() and isinstance(scale, torch.Tensor):
                name = f"scaler.{self._order.number(scaler)}"
                call = session.clock.take(at, Kind.SCHEDULE, name, "scale").number
                with unobserved():
                    value = scale.detach().to(torch.float64).reshape(())
                session.emit(value, at, Kind.SCHEDULE, name, "scale", call=call)

    @guard("scaler construction")
    def _number(self, scaler: GradScaler) -> None:
        self._order.number(scaler)

    @guard("unscale: before")
    def _before_unscale(self) -> None:
        self._session.gradients_read()

    @guard("unscale: after")
    def _after_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if not scaler.is_enabled():
            return
        session, at = self._session, self._session.clock.backward_moment()
        if not self._unscaled:
            self._unscaled = True
            session.sink.absent(Kind.UNSCALED_GRAD, None)
        if session.quiet:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name = session.names.tensor(parameter).name
                    call = session.clock.ordinal(Kind.UNSCALED_GRAD, name)
                    session.emit(
                        parameter.grad, at, Kind.UNSCALED_GRAD, name, "grad", call=call, parameter=parameter
                    )

    @guard("scaler step: before")
    def _begin(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._local.stepping.append((scaler, optimizer))
        self._local.stepped = False

    @guard("scaler step: after")
    def _finish(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        if scaler.is_enabled() and not self._local.stepped:
            for listener in self.on_skip:
                listener(optimizer)

    def _unwind(self, scaler: GradScaler) -> None:
        stepping = self._local.stepping
        if stepping and stepping[-1][0] is scaler:
            stepping.pop()
