"""Tells from statistics whether a step went wrong: numbers that stopped being finite, a loss that jumped."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable

from tensortrace.tracer.types import Entry, Kind, Triggered

NONFINITE = "nonfinite"
LOSS_SPIKE = "loss-spike"

SPIKE_TIMES = 10.0
"""How many spreads above the median a loss is a spike, unless ``loss-spike:K`` says otherwise."""

REMEMBERED = 64
"""Steps whose losses make the median and the spread."""

BEFORE_JUDGING = 8
"""A loss is judged once so many steps went before it."""

LEAST_SPREAD = 0.01
"""The spread is at least this part of the median: losses that hardly move are no reason to see spikes."""

_TO_SIGMA = 1.4826  # of normally distributed numbers, the median deviation times this is the deviation

_ALWAYS = frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE})
_NAN_ALONE = frozenset({Kind.ACTIVATION, Kind.BUFFER})
_GRADIENTS = frozenset(
    {Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD}
)
_SCALED_LOSS = "weight"
_BACKWARD = "backward"

_Name = tuple[Kind, str, str]


class Watch:
    """Looks at each entry of a step as it is written, and judges the step when it ends; on one thread.

    ``triggers`` are ``nonfinite``, ``loss-spike`` and ``loss-spike:K``; others are not its business.
    ``sees_updates`` tells whether the recording includes what optimizers did: then gradients count only in
    steps in which each optimizer used them.
    """

    def __init__(self, triggers: Iterable[str], *, sees_updates: bool) -> None:
        named = [trigger.partition(":") for trigger in triggers]
        self._nonfinite = any(name == NONFINITE for name, _, _ in named)
        spikes = [float(times or SPIKE_TIMES) for name, _, times in named if name == LOSS_SPIKE]
        self._spike_times = spikes[0] if spikes else None
        self._sees_updates = sees_updates
        self._was_finite: set[_Name] = set()
        self._is_odd: set[_Name] = set()
        self._losses: deque[float] = deque(maxlen=REMEMBERED)
        self._begin()

    def _begin(self) -> None:
        self._finite: set[_Name] = set()
        self._found: list[Entry] = []
        self._found_odd: set[_Name] = set()
        self._sums: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._loss: Entry | None = None
        self._roots: list[Entry] = []
        self._scaled = False
        self._updates: list[bool] = []

    def see(self, entry: Entry) -> None:
        """Take note of an entry of the present step."""
        stats = entry.stats
        if stats is None:
            return
        if self._nonfinite:
            self._see_finite(entry, stats.nan, stats.inf)
        if entry.kind is Kind.LOSS and entry.microbatch is not None and stats.mean is not None:
            self._see_loss(entry, stats.mean)
        if entry.kind is Kind.SCHEDULE and entry.slot == "skipped" and stats.mean is not None:
            self._updates.append(stats.mean == 0)
        self._scaled = self._scaled or (entry.kind is Kind.SCHEDULE and entry.slot == "scale")

    def end_step(self, step: int) -> Triggered | None:
        """Judge the step, and begin another; return what set off a trigger, the first in order of events."""
        nonfinite, spike = self._first_nonfinite(), self._spike()
        self._was_finite |= self._finite - self._found_odd
        self._is_odd |= self._found_odd
        self._begin()
        if nonfinite is not None:
            return _triggered(NONFINITE, step, nonfinite, _counted(nonfinite))
        if spike is not None:
            return _triggered(LOSS_SPIKE, step, *spike)
        return None

    def _see_finite(self, entry: Entry, nan: int, inf: int) -> None:
        kind, name = entry.kind, (entry.kind, entry.name, entry.slot)
        bad = nan if kind in _NAN_ALONE else nan + inf
        if kind not in _ALWAYS | _NAN_ALONE | _GRADIENTS and kind is not Kind.LOSS:
            return
        if not bad:
            self._finite.add(name)
            return
        new = kind is Kind.LOSS or (name in self._was_finite and name not in self._is_odd)
        if new:
            self._found.append(entry)
        elif not _may_overflow(entry):
            self._found_odd.add(name)

    def _first_nonfinite(self) -> Entry | None:
        updated = all(self._updates) and (bool(self._updates) or not self._sees_updates)
        found = (entry for entry in self._found if updated or not _may_overflow(entry))
        return min(found, key=lambda entry: entry.event, default=None)

    def _see_loss(self, entry: Entry, value: float) -> None:
        if entry.name == _BACKWARD:
            self._roots.append(entry)
        elif entry.slot == "sum":
            self._sums[entry.name] = self._sums.get(entry.name, 0.0) + value
            self._loss = self._loss or entry
        elif entry.slot == "count":
            self._counts[entry.name] = self._counts.get(entry.name, 0.0) + value

    def _loss_of_step(self) -> tuple[Entry, float] | None:
        """Return L and an entry that it is of; None where the step has none that is finite.

        L is the sum, over the losses by name, of sum over count; of losses that are not known, the mean of
        what backward started from, unless a loss scaler scales it.
        """
        counted = [name for name, count in self._counts.items() if count and name in self._sums]
        if self._loss is not None and counted:
            found = self._loss, sum(self._sums[name] / self._counts[name] for name in counted)
        elif self._roots and not self._scaled:
            values = [root.stats.mean for root in self._roots if root.stats and root.stats.mean is not None]
            found = self._roots[0], sum(values) / len(values)
        else:
            return None
        return found if math.isfinite(found[1]) else None

    def _spike(self) -> tuple[Entry, str] | None:
        """Judge L, the loss per token of the step, against those of the steps before; then remember it.

        With m the median of the latest L and s = 1.4826 median |L - m|, at least 0.01 |m|, a spike is
        L > m + K s.
        """
        found = self._loss_of_step()
        if self._spike_times is None or found is None:
            return None
        entry, loss = found
        known = list(self._losses)
        self._losses.append(loss)
        if len(known) < BEFORE_JUDGING:
            return None
        middle = statistics.median(known)
        spread = _TO_SIGMA * statistics.median(abs(each - middle) for each in known)
        limit = middle + self._spike_times * max(spread, LEAST_SPREAD * abs(middle))
        if loss <= limit:
            return None
        return (
            entry,
            f"loss per token {loss:.6g}, above {limit:.6g} (median of {len(known)} steps {middle:.6g})",
        )


def _may_overflow(entry: Entry) -> bool:
    """Tell whether a loss scaler multiplies the value: it skips steps where that is not finite, as usual."""
    if entry.kind is Kind.LOSS:
        return entry.name == _BACKWARD or entry.slot == _SCALED_LOSS
    return entry.kind in _GRADIENTS


def _counted(entry: Entry) -> str:
    stats = entry.stats
    assert stats is not None
    total = stats.finite + stats.nan + stats.inf
    bad = [f"{count} {what}" for count, what in ((stats.nan, "NaN"), (stats.inf, "infinite")) if count]
    return f"{' and '.join(bad)} of {total} element{'' if total == 1 else 's'}"


def _triggered(trigger: str, step: int, entry: Entry, text: str) -> Triggered:
    return Triggered(
        trigger=trigger, step=step, at=time.time(), text=text, event=entry.event, microbatch=entry.microbatch,
        kind=entry.kind, name=entry.name, slot=entry.slot,
    )  # fmt: skip
