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
from tensortrace.tracer.hooks.numbers import finite_number
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
            position = finite_number(getattr(scheduler, "last_epoch", None))
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

    Functions that the program gave it cannot be written down: ``functions`` tells of them. Other values that
    are no finite numbers, words or lists of such numbers are left out.
    """
    found: dict[str, object] = {"optimizer": optimizer}
    for key, value in list(vars(scheduler).items()):
        name = _HIDDEN.get(key, key)
        if name in _MOVING or not isinstance(name, str) or name.startswith("_"):
            continue
        if isinstance(value, (str, list, tuple, Counter)) and len(value) > _MOST:
            return None
        kept = _written(value)
        if kept is not None:
            found[_word(name)] = kept
    if getattr(scheduler, "_scale_fn_custom", None) is not None or hasattr(scheduler, "lr_lambdas"):
        found["functions"] = True
    text = msgspec.json.encode(found).decode()
    return text if len(text) <= _MOST else None


def _written(value: object) -> object:
    """Return a finite number, a word or a list of such numbers as it is written down, else None."""
    if isinstance(value, str):
        return _word(value)
    if isinstance(value, Counter):
        return _counted(value)
    if isinstance(value, (list, tuple)):
        parts = [phase.get("end_step") if isinstance(phase, dict) else phase for phase in value]
        numbers = [finite_number(part) for part in parts]
        return None if None in numbers else numbers
    return finite_number(value)


def _counted(counts: Counter[object]) -> list[float] | None:
    """Return what was counted, each number as often as it was, in order; None where that is no such list."""
    found: list[float] = []
    for value, times in counts.items():
        number, often = finite_number(value), finite_number(times)
        if number is None or not isinstance(often, int) or often + len(found) > _MOST:
            return None
        found += [number] * often
    return sorted(found)


def _word(text: str) -> str:
    """Return the characters of a string of any class, as far as they can be written down."""
    return str.__str__(text).encode(errors="backslashreplace").decode()
