"""Numbers the dropout calls of a module so that a recomputed call has the number of its first pass."""

from __future__ import annotations

from collections import Counter

import torch

from tensortrace.tracer.hooks.clock import Clock, Moment
from tensortrace.tracer.types import Kind

_SLOT = "(dropout)"


class Numbering:
    """Counts per moment and module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._again: Counter[tuple[int, Moment, str]] = Counter()

    def take(self, at: Moment, name: str) -> int:
        """Return the next number; in a recompute, those of the first pass in order.

        A checkpoint of the program's own isn't known to the clock: there the order within the backward is
        taken for the order of the first pass.
        """
        if self._clock.is_recompute() and not self._clock.in_region():
            key = (torch._C._current_graph_task_id(), at, name)
            self._again[key] += 1
            return self._again[key] - 1
        return self._clock.take(at, Kind.ACTIVATION, name, _SLOT).number

    def clear(self) -> None:
        """Forget the numbers of a window."""
        self._again.clear()
