"""Records what each optimizer step consumes, the values that enter it, and what it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensortrace.tracer.copies import unobserved, unsupported
from tensortrace.tracer.hooks.gradients import Gradients
from tensortrace.tracer.hooks.guard import guard, hide
from tensortrace.tracer.hooks.imports import when_imported
from tensortrace.tracer.hooks.numbers import plain_number
from tensortrace.tracer.hooks.optimizer_depth import is_outermost_step, watched
from tensortrace.tracer.hooks.scaler import Scalers
from tensortrace.tracer.hooks.schedule import Schedules
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.state import State
from tensortrace.tracer.hooks.walk import printable
from tensortrace.tracer.placements import split, zero
from tensortrace.tracer.types import INIT_STEP, Kind, Meta

ENVIRONMENT = frozenset(
    {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
)
"""Entries of a parameter group that don't enter the update formula."""

MOST_PARTS = 64
"""Numbers in a list that is an entry of a parameter group: longer ones are what a program has written down
there, not what an update is made of, and every number is a boundary.
"""


class Optimizers:
    """Watches every optimizer's ``step`` through torch's global hooks."""

    def __init__(
        self, session: Session, gradients: Gradients, state: State, scalers: Scalers, schedules: Schedules
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._state = state
        self._scalers = scalers
        self._schedules = schedules
        self._calls: dict[int, int] = {}

    def install(self) -> None:
        """Register the step hooks, and number optimizers as they are constructed."""
        session, original = self._session, Optimizer.__init__

        @functools.wraps(original)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            _number(session, self)
            original(self, *args, **kwargs)

        session.patches.attribute(Optimizer, "__init__", __init__)
        when_imported(session.patches, zero.MODULE, self._leave_out_inner)
        for handle in (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ):
            session.patches.on_undo(handle.remove)

    def _leave_out_inner(self, module: ModuleType) -> None:
        """See to it that an optimizer inside another one gets no number; its steps are of the outer one."""
        owner = zero.zero_class(module)
        if owner is not None:
            hidden = hide(getattr(owner, zero.CONSTRUCTS_INNER))
            self._session.patches.attribute(owner, zero.CONSTRUCTS_INNER, hidden)

    def watch_class(self, kind: type[Optimizer]) -> None:
        """Watch the steps of a class that torch has not prepared for hooks: it left out ``__init__``."""
        original: Callable[..., Any] = kind.step
        if hasattr(original, "hooked") or "step" not in vars(kind):
            return
        self._session.patches.attribute(kind, "step", watched(original, self._before, self._after))

    @guard("skipped optimizer step")
    def skipped(self, optimizer: Optimizer) -> None:
        """Record a step that a scaler skipped: what would have been consumed, and what stayed."""
        self._begin(optimizer, has_closure=False)
        with unobserved():
            skipped = torch.ones((), dtype=torch.int64)
        self._end(optimizer, skipped, has_closure=False)

    @guard("optimizer step: before")
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_outermost_step():
            self._begin(optimizer, has_closure=_has_closure(args, kwargs))

    @guard("optimizer step: after")
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_outermost_step():
            self._end(optimizer, None, has_closure=_has_closure(args, kwargs))

    def _begin(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        number = self._session.optimizers.number(optimizer)
        if not self._session.clock.optimizer_began(number, has_closure=has_closure):
            return
        self._session.gradients_read()
        if self._session.quiet:
            self._scalers.record()
            return
        parameters = self._parameters(optimizer)
        inside_backward = torch._C._current_graph_task_id() >= 0
        self._gradients.emit_sums(parameters if inside_backward else None)
        call = self._session.clock.ordinal(Kind.SCHEDULE, f"optimizer.{number}")
        self._calls[number] = call
        if not has_closure:
            self._consumed(parameters, call)
        self._groups(optimizer, number, call)
        self._schedules.record(optimizer)
        self._scalers.record()

    def _end(self, optimizer: Optimizer, skipped: torch.Tensor | None, *, has_closure: bool) -> None:
        """Record what a step left; without ``skipped`` the optimizer itself tells whether it did nothing."""
        session, at = self._session, self._session.clock.window()
        if at.step == INIT_STEP:
            return
        if session.quiet:
            if has_closure:
                session.gradients_read()
            session.clock.optimizer_ended()
            return
        number = session.optimizers.number(optimizer)
        call = self._calls.get(number, 0)
        if has_closure:  # which made the gradients
            session.gradients_read()
            self._consumed(self._parameters(optimizer), call)
        if skipped is None:
            with unobserved():
                skipped = _found_inf(optimizer)
        session.emit(skipped, at, Kind.SCHEDULE, f"optimizer.{number}", "skipped", call=call)
        self._gradients.emit_sums(self._parameters(optimizer))
        self._state.record_optimizer(optimizer, at, call)
        self._state.record_parameters(self._parameters(optimizer))
        session.clock.optimizer_ended()

    def _parameters(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return the optimizer's parameters without those that another rank's pipeline stage updates."""
        elsewhere = self._session.names.elsewhere()
        groups = (group["params"] for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group if id(parameter) not in elsewhere]

    def _consumed(self, parameters: list[torch.Tensor], call: int) -> None:
        session, at = self._session, self._session.clock.window()
        for parameter in parameters:
            if parameter.grad is not None:
                name = session.names.tensor(parameter).name
                own = session.clock.take_from(call, at, Kind.CLIPPED_GRAD, name, "grad")
                session.emit(
                    parameter.grad, at, Kind.CLIPPED_GRAD, name, "grad", call=own, parameter=parameter
                )

    def _groups(self, optimizer: Optimizer, number: int, call: int) -> None:
        session, at = self._session, self._session.clock.window()
        for index, group in enumerate(optimizer.param_groups):
            name = f"optimizer.{number}.group.{index}"
            members = tuple(session.flats.names(group["params"]))
            meta = Meta(members=members, optimizer=type(zero.stepping(optimizer)).__name__)
            for slot, value in _values(group):
                session.emit(value, at, Kind.SCHEDULE, name, slot, call=call, meta=meta)


def _has_closure(args: Any, kwargs: Any) -> bool:
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure is not None


@guard("optimizer construction")
def _number(session: Session, optimizer: Optimizer) -> None:
    session.optimizers.number(optimizer)


def _found_inf(optimizer: Optimizer) -> torch.Tensor:
    """Return 1 where a fused step found its gradients not finite and did nothing, else 0 (int64)."""
    found = getattr(optimizer, "found_inf", None)
    if isinstance(found, torch.Tensor):
        return (split(found)[0].detach() != 0).to(torch.int64).reshape(())
    return torch.zeros((), dtype=torch.int64)


def _values(group: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, float64 tensor) of each number of a parameter group."""
    found: list[tuple[str, torch.Tensor]] = []
    with unobserved():
        for key, value in group.items():
            if key in ENVIRONMENT:
                continue
            several = isinstance(value, (list, tuple))
            if several and len(value) > MOST_PARTS:
                continue
            name = printable(str(key))
            parts = [(f"{name}.{i}", part) for i, part in enumerate(value)] if several else [(name, value)]
            found += [(slot, number) for slot, part in parts if (number := _float64(part)) is not None]
    return found


def _float64(value: object) -> torch.Tensor | None:
    """Return a real number as a tensor without dimensions, None for anything else.

    One whose value cannot be had (on the meta device) is returned as it is: the recorder notes what it drops.
    """
    if not isinstance(value, torch.Tensor):
        number = plain_number(value)
        return None if number is None else torch.tensor(float(number), dtype=torch.float64)
    if value.numel() != 1 or value.is_complex():
        return None
    local = split(value)[0].detach()
    return local if unsupported(local) else local.to(torch.float64).reshape(())
