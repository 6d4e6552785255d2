"""Records the position of each learning-rate scheduler, with its settings, when an update begins."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.order import Order
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.types import Kind, Meta


class Schedules:
    """Numbers schedulers as they are constructed; the parts of a composed one are schedulers too."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.order: Order[LRScheduler] = Order()

    def install(self) -> None:
        """Wrap the constructors of torch's own schedulers: some don't call their base class's."""
        for value in list(vars(lr_scheduler).values()):
            if isinstance(value, type) and issubclass(value, LRScheduler) and "__init__" in vars(value):
                self._session.patches.attribute(value, "__init__", self._wrapped(value.__init__))

    def record(self, optimizer: Optimizer) -> None:
        """Record where each scheduler of this optimizer stands."""
        session, at = self._session, self._session.clock.window()
        for scheduler in self.order:
            position = getattr(scheduler, "last_epoch", None)
            if isinstance(position, int) and _drives(scheduler, optimizer):
                name = f"scheduler.{self.order.number(scheduler)}"
                call = session.clock.take(at, Kind.SCHEDULE, name, "position").number
                with unobserved():
                    value = torch.tensor(position, dtype=torch.int64)
                number = session.optimizers.number(optimizer)
                meta = Meta(module=type(scheduler).__name__, text=settings_of_scheduler(scheduler, number))
                session.emit(value, at, Kind.SCHEDULE, name, "position", call=call, meta=meta)

    def _wrapped(self, original: Callable[..., None]) -> Callable[..., None]:
        schedules = self

        @functools.wraps(original)
        def __init__(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            schedules._number(self)
            original(self, *args, **kwargs)

        return __init__

    @guard("scheduler construction")
    def _number(self, scheduler: LRScheduler) -> None:
        self.order.number(scheduler)


def _drives(scheduler: LRScheduler, optimizer: Optimizer) -> bool:
    """Tell whether the scheduler sets this optimizer's values, directly or through a wrapper of it."""
    found: object = getattr(scheduler, "optimizer", None)
    for _ in range(4):
        if found is optimizer:
            return True
        found = getattr(found, "optimizer", None)
    return False


_MOVING = frozenset({"last_epoch", "last_batch_iteration", "T_cur", "T_i", "verbose"})
"""Attributes of schedulers that are no settings: they move with the position."""

_HIDDEN = {"_anneal_func_type": "anneal_func", "_schedule_phases": "end_steps"}
"""Private attributes of torch's schedulers that are settings, with the names they are recorded under."""

_MOST = 2000
"""Characters of settings that are recorded with a position."""


def settings_of_scheduler(scheduler: LRScheduler, optimizer: int) -> str | None:
    """Return the numbers and words that a scheduler was made with as JSON; None where they are too many.

    Functions that the program gave it cannot be written down: ``functions`` tells of them.
    """
    found: dict[str, object] = {"optimizer": optimizer}
    for key, value in vars(scheduler).items():
        name = _HIDDEN.get(key, key)
        if name in _MOVING or name.startswith("_"):
            continue
        kept = _written(value)
        if kept is not None:
            found[name] = kept
    if getattr(scheduler, "_scale_fn_custom", None) is not None or hasattr(scheduler, "lr_lambdas"):
        found["functions"] = True
    text = msgspec.json.encode(found, enc_hook=_plain).decode()
    return text if len(text) <= _MOST else None


def _plain(value: object) -> object:
    """Return a number or word of a class of its own as a plain one: numpy's numbers are floats to Python."""
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    return str(value)


def _written(value: object) -> object:
    """Return a number, a word or a list of numbers as it is written down; None for anything else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, (list, tuple)):
        ends = [phase.get("end_step") if isinstance(phase, dict) else phase for phase in value]
        return ends if all(isinstance(end, (int, float)) for end in ends) else None
    return None
