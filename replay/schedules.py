"""Contracts of the schedule: a scheduler moves by one a window, its closed form gives the rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.comparison import by_rank, replica
from tensortrace.replay.computed import number_of
from tensortrace.replay.contract import Contract, Contracts, Step, beyond_number, readable
from tensortrace.tracer.types import Kind

SETTING = "a setting of the optimizer or the scaler, which nothing computes"
UNKNOWN = "{name} has no closed form, or the trace does not hold its settings"
SEVERAL = "several schedulers set it: they are not composed here"
JUMPED = "a scheduler moves by at most one in a window"

_RECURRENCE = 2.0**10
"""Times float64's round-off that a rate may be off by: recurrences lose some digits over many steps."""

_SINGLE = 2.0**29
"""Spacings of float64 in one of float32, in which a rate that is a tensor may be kept."""


_Setting = bool | float | str | list[float | None] | None


class Settings(NamedTuple):
    """One scheduler at one step: its class, its position, the numbers and words that it was made with."""

    kind: str
    position: int
    numbers: Mapping[str, float]
    lists: Mapping[str, list[float]]
    words: Mapping[str, str]

    @classmethod
    def of(cls, kind: str, position: int, text: str | None) -> Settings:
        """Read what was recorded; there are no settings where it is damaged, or nothing was.

        Numbers that JSON cannot hold stand as null in older traces: such a setting is left out.
        """
        try:
            raw = msgspec.json.decode(text or "{}", type=dict[str, _Setting])
        except (msgspec.DecodeError, RecursionError):
            raw = {}
        return cls(
            kind,
            position,
            {k: float(v) for k, v in raw.items() if isinstance(v, (bool, int, float))},
            {k: numbers for k, v in raw.items() if isinstance(v, list) and (numbers := _all(v)) is not None},
            {k: v for k, v in raw.items() if isinstance(v, str)},
        )

    @property
    def optimizer(self) -> str:
        """The optimizer whose rates it sets; "" where the trace does not say."""
        return f"optimizer.{self.numbers['optimizer']:.0f}" if "optimizer" in self.numbers else ""


def _all(numbers: list[float | None]) -> list[float] | None:
    found = [float(number) for number in numbers if number is not None]
    return found if len(found) == len(numbers) else None


def schedule(step: Step, contracts: Contracts, began: Mapping[Slot, tuple[int, int]]) -> None:
    """Add the contracts of positions and learning rates.

    ``began`` has of each scheduler the position and the number of windows from which its moves are counted.
    """
    schedulers: list[Settings] = []
    for slot, items in step.view.find(Kind.SCHEDULE):
        if slot.slot == "position" and readable(*items):
            schedulers.append(settings_of(replica(items)))
            _position(slot, items, step, began, contracts)
    for slot, items in step.view.find(Kind.SCHEDULE):
        if slot.slot == "position":
            continue
        if slot.slot == "lr" and ".group." in slot.name:
            _rate(slot, items, step.view, schedulers, contracts)
        else:
            contracts.gap(slot, items, SETTING)


def settings_of(item: Item) -> Settings:
    """Return what a trace holds of a scheduler."""
    return Settings.of(item.entry.meta.module or "", int(item.read()), item.entry.meta.text)


def _position(
    slot: Slot,
    items: tuple[Item, ...],
    step: Step,
    began: Mapping[Slot, tuple[int, int]],
    contracts: Contracts,
) -> None:
    """Say that a scheduler stands where it began, or has moved by no more than one a window.

    Programs step schedulers each window or each epoch: where it has moved by more, one a window was meant.
    """
    if slot not in began:
        contracts.gap(slot, items, "it is the first that was recorded")
        return
    first, windows = began[slot]
    here = int(replica(items).read())
    meant = here if first <= here <= first + windows else first + windows
    expected = number_of(by_rank(items)[0], meant, dtype="int64")
    contracts.found.append(Contract(slot, None, items, expected, text=JUMPED))


def _rate(
    slot: Slot, items: tuple[Item, ...], view: StepView, schedulers: list[Settings], contracts: Contracts
) -> None:
    owner, _, group = slot.name.partition(".group.")
    mine = [s for s in schedulers if s.optimizer in (owner, "")]
    if not mine:
        contracts.gap(slot, items, SETTING)
        return
    if len(mine) > 1:
        contracts.gap(slot, items, SEVERAL)
        return
    rate = closed_form(mine[0], int(group), _others(slot, view))
    if rate is None or not math.isfinite(rate):
        contracts.gap(slot, items, UNKNOWN.format(name=mine[0].kind))
        return
    first = by_rank(items)[0]
    positions = [s for s, _ in view.find(Kind.SCHEDULE) if s.slot == "position"]
    text = f"by the closed form of {mine[0].kind} at position {mine[0].position}"
    there = float(first.read())
    own = beyond_number(rate, first, _SINGLE if float(np.float32(there)) == there else _RECURRENCE)
    reads = tuple((None, position) for position in positions)
    contracts.found.append(Contract(slot, None, items, number_of(first, rate), reads, own, text))


def _others(slot: Slot, view: StepView) -> dict[str, float]:
    """Return the other values of a group."""
    found = ((s, i) for s, i in view.find(Kind.SCHEDULE) if s.name == slot.name and s.call == slot.call)
    return {s.slot: float(replica(i).read()) for s, i in found}


def closed_form(scheduler: Settings, group: int, values: Mapping[str, float]) -> float | None:
    """Return the learning rate of a group; None where the scheduler has no closed form that is known."""
    bases, form = scheduler.lists.get("base_lrs", []), _FORMS.get(scheduler.kind)
    if form is None or not 0 <= group < len(bases) or "functions" in scheduler.numbers:
        return None
    try:
        return form(scheduler, bases[group], group, values)
    except (LookupError, ArithmeticError, ValueError):
        return None  # settings that the trace lacks, or that no scheduler takes


def _step(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    return float(base * s.numbers["gamma"] ** (s.position // int(s.numbers["step_size"])))


def _milestones(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    return float(base * s.numbers["gamma"] ** bisect_right(s.lists["milestones"], s.position))


def _constant(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    return base * (1.0 if s.position >= s.numbers["total_iters"] else s.numbers["factor"])


def _linear(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    start, end, total = s.numbers["start_factor"], s.numbers["end_factor"], s.numbers["total_iters"]
    return base * (start + (end - start) * min(total, s.position) / total)


def _exponential(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    return float(base * s.numbers["gamma"] ** s.position)


def _polynomial(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    total = s.numbers["total_iters"]
    return float(base * (1 - min(total, s.position) / total) ** s.numbers["power"])


def _cosine(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    least = s.numbers["eta_min"]
    return least + (base - least) * (1 + math.cos(math.pi * s.position / s.numbers["T_max"])) / 2


def _restarts(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    length, times, least, here = (
        s.numbers["T_0"],
        s.numbers["T_mult"],
        s.numbers["eta_min"],
        float(s.position),
    )
    if length <= 0 or times < 1:
        raise ValueError(length)
    if times == 1:
        here %= length
    while times > 1 and here >= length:
        here, length = here - length, length * times
    return least + (base - least) * (1 + math.cos(math.pi * here / length)) / 2


def _cyclic(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    total, ratio = s.numbers["total_size"], s.numbers["step_ratio"]
    cycle = math.floor(1 + s.position / total)
    along = 1 + s.position / total - cycle
    height = along / ratio if along <= ratio else (along - 1) / (ratio - 1)
    factors = {
        "triangular": 1.0,
        "triangular2": 2.0 ** (1 - cycle),
        "exp_range": s.numbers.get("gamma", 1.0) ** s.position,
    }
    return base + (s.lists["max_lrs"][group] - base) * height * factors[s.words["mode"]]


def _one_cycle(s: Settings, base: float, group: int, values: Mapping[str, float]) -> float:
    """Return the rate in the phase that the position lies in, between the rates at the phases' ends."""
    ends = s.lists["end_steps"]
    rates = [base, values["max_lr"], *([base] if len(ends) == 3 else []), values["min_lr"]]
    phase = next((n for n, end in enumerate(ends) if s.position <= end), len(ends) - 1)
    begin = ends[phase - 1] if phase else 0.0
    share = (s.position - begin) / (ends[phase] - begin)
    first, last = rates[phase], rates[phase + 1]
    if s.words["anneal_func"] == "linear":
        return first + (last - first) * share
    return last + (first - last) / 2 * (1 + math.cos(math.pi * share))


_Form = Callable[[Settings, float, int, Mapping[str, float]], float]

_FORMS: dict[str, _Form] = {
    "StepLR": _step,
    "MultiStepLR": _milestones,
    "ConstantLR": _constant,
    "LinearLR": _linear,
    "ExponentialLR": _exponential,
    "PolynomialLR": _polynomial,
    "CosineAnnealingLR": _cosine,
    "CosineAnnealingWarmRestarts": _restarts,
    "CyclicLR": _cyclic,
    "OneCycleLR": _one_cycle,
}
"""Closed forms by the name of the scheduler's class, as torch documents them."""
