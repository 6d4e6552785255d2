"""Plans what clipping states of itself: its norm, limit and coefficient, call by call or by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.gradients import CLIP
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan, by_rank
from tensortrace.diff.plan.consumers import Ref
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import Streamed, one, paired
from tensortrace.tracer.types import Kind

_EVENT_SLOTS = ("total_norm", "max_norm", "norm_type", "coefficient")


def window_slot(kind: Kind, name: str, slot: str, call: int = 0) -> Slot:
    """Return the slot of a boundary that belongs to the window."""
    return Slot("window", kind, name, slot, call)


class ClipEvent(NamedTuple):
    """One clipping of one run: its ordinal, microbatch, and scalars of the lowest rank and of all."""

    call: int
    microbatch: int
    scalars: dict[str, Item]
    held: dict[str, tuple[Item, ...]]


def clip_events(view: StepView) -> tuple[ClipEvent, ...]:
    """Return the clip events of a window in order."""
    found: dict[int, dict[str, tuple[Item, ...]]] = {}
    for slot in view.named(Kind.CLIPPED_GRAD, CLIP):
        found.setdefault(slot.call, {})[slot.slot] = by_rank(view.items[slot])
    events = []
    for call, held in sorted(found.items()):
        scalars = {slot: items[0] for slot, items in held.items()}
        microbatch = next(iter(scalars.values())).entry.microbatch
        events.append(ClipEvent(call, microbatch or 0, scalars, held))
    return tuple(events)


def final_events(view: StepView) -> tuple[ClipEvent, ...]:
    """Return the clip events after the window's last microbatch began."""
    last = view.last_microbatch()
    return tuple(e for e in clip_events(view) if e.microbatch >= last)


def early_events(view: StepView) -> tuple[ClipEvent, ...]:
    """Return the clip events before the window's last microbatch began."""
    last = view.last_microbatch()
    return tuple(e for e in clip_events(view) if e.microbatch < last)


def plan_clip_events(pair: StepPair, plan: StepPlan) -> None:
    """Add what each clipping states: before the window's last microbatch, and at its end."""
    uneven = any(len(set(_passes(view).values())) > 1 for view in (pair.a, pair.b))
    for early, events_a, events_b in (
        (True, early_events(pair.a), early_events(pair.b)),
        (False, final_events(pair.a), final_events(pair.b)),
    ):
        if early and uneven:
            continue  # where ranks count other numbers of passes, the end of one's window is amid another's
        if not early and _by_member(events_a, events_b, plan):
            continue
        for number in range(max(len(events_a), len(events_b))):
            a = events_a[number] if number < len(events_a) else None
            b = events_b[number] if number < len(events_b) else None
            _plan_event(a, b, number, plan, pair, early=early)


def _by_member(events_a: Sequence[ClipEvent], events_b: Sequence[ClipEvent], plan: StepPlan) -> bool:
    """Compare what clips each parameter, where the runs clip the same ones in other numbers of calls.

    A program may clip groups of parameters one after the other, all by the norm of all.
    """
    of_a, of_b = _calls_of_members(events_a), _calls_of_members(events_b)
    if len(events_a) == len(events_b) or not of_a or not of_b or of_a.keys() != of_b.keys():
        return False
    for name in _EVENT_SLOTS:
        sides = [[event.scalars.get(name) for event in calls.values()] for calls in (of_a, of_b)]
        a, b = (tuple(dict.fromkeys(i for i in side if i is not None)) for side in sides)
        if not all(sides) or any(item is None for side in sides for item in side):
            continue
        slot = window_slot(Kind.CLIPPED_GRAD, CLIP, name)
        parents = _event_parents(name, slot, None, events_b[0])
        if name == "total_norm":
            befores = (window_slot(Kind.CLIPPED_GRAD, member, "before") for member in of_b)
            parents = (*parents, *((None, before) for before in befores))
        load = partial(_of_members, *([i for i in side if i is not None] for side in sides))
        exact = name in ("max_norm", "norm_type")
        plan.comparisons.append(
            Comparison(slot, None, load, a, b, tuple(dict.fromkeys(parents)), exact=exact)
        )
    return True


def _calls_of_members(events: Sequence[ClipEvent]) -> dict[str, ClipEvent]:
    """Return which call clips each parameter, by name; empty where one is clipped twice."""
    found: dict[str, ClipEvent] = {}
    for event in events:
        held = next(iter(event.held.values()))
        for member in dict.fromkeys(name for item in held for name in item.entry.meta.members):
            if member in found:
                return {}
            found[member] = event
    return dict(sorted(found.items()))


def _of_members(a: Sequence[Item], b: Sequence[Item]) -> Assembled:
    x, y = (np.array([float(item.read()) for item in side]) for side in (a, b))
    return Assembled(x, y)


def _passes(view: StepView) -> dict[int, int]:
    """Return the number of training passes of each data cell."""
    found: dict[int, int] = {}
    for part in view.parts:
        if part.phase == "train":
            found[part.rank] = max(found.get(part.rank, 0), part.number + 1)
    return found


def _plan_event(
    a: ClipEvent | None, b: ClipEvent | None, number: int, plan: StepPlan, pair: StepPair, *, early: bool
) -> None:
    present = b or a
    assert present is not None
    microbatch = present.microbatch if early else None
    for name in _EVENT_SLOTS:
        slot = window_slot(Kind.CLIPPED_GRAD, CLIP, name, present.call if early else number)
        x, y = (e.scalars.get(name) if e else None for e in (a, b))
        if x and y and a and b:
            x, y = _farthest(a.held[name], b.held[name])
            load = _pair_loader(x, y)
            exact = name in ("max_norm", "norm_type")
            parents = _event_parents(name, slot, microbatch, present)
            plan.comparisons.append(Comparison(slot, microbatch, load, (x,), (y,), parents, exact=exact))
        elif a and b:
            continue  # both clipped: by functions that state different things about it
        elif x or y:
            side = "a" if x else "b"
            when = "before the window's last microbatch" if early else "at the end of the window"
            text = f"clipping {when} happened only in {side}"
            one = x or y
            assert one is not None
            if _left_alone(present):
                text += ", where it left the gradients as they were"
                plan.one_sided.append(
                    OneSided("a" if x else "b", slot, microbatch, (one,), text, counts=False)
                )
                continue
            lacking = pair.gradients_b if x else pair.gradients_a
            if not early and lacking.by_hand is not None:
                clips = (
                    "shrinks its gradients by code of its own"
                    if lacking.from_rung
                    else "clips by hand as much"
                )
                text = f"only {side} calls a function that clips; the other {clips}"
                plan.one_sided.append(
                    OneSided("a" if x else "b", slot, microbatch, (one,), text, counts=False)
                )
                continue
            # one event is one finding: its norm, on which the rest depends
            parents = () if name == "total_norm" else ((microbatch, slot._replace(slot="total_norm")),)
            plan.one_sided.append(
                OneSided("a" if x else "b", slot, microbatch, (one,), text, diverges=True, parents=parents)
            )


def _left_alone(event: ClipEvent) -> bool:
    """Tell whether clipping scaled nothing: the norm was within its limit."""
    item = event.scalars.get("coefficient")
    return item is not None and item.source.stored(item.entry) and bool(np.all(item.read() == 1))


def _event_parents(name: str, slot: Slot, microbatch: int | None, event: ClipEvent) -> tuple[Ref, ...]:
    if name == "coefficient":
        return tuple((microbatch, slot._replace(slot=s)) for s in ("total_norm", "max_norm"))
    if name == "total_norm":
        kind_of_norm: tuple[Ref, ...] = ((microbatch, slot._replace(slot="norm_type")),)
        if microbatch is not None:
            return kind_of_norm
        held = next(iter(event.held.values()))
        members = dict.fromkeys(name for item in held for name in item.entry.meta.members)
        return (*kind_of_norm, *((None, window_slot(Kind.CLIPPED_GRAD, m, "before")) for m in members))
    return ()


def _farthest(a: Sequence[Item], b: Sequence[Item]) -> tuple[Item, Item]:
    """Return the rank of b that is farthest from all ranks of a, and the one of a that is nearest to it."""
    of_a = {item.entry.digest: item for item in reversed(a)}
    of_b = {item.entry.digest: item for item in reversed(b)}
    if len(of_a) == len(of_b) == 1:
        return a[0], b[0]
    values_a, values_b = ([(float(i.read()), i) for i in side.values()] for side in (of_a, of_b))

    def apart(one: tuple[float, Item], other: tuple[float, Item]) -> float:
        distance = 0.0 if one[1].entry.digest == other[1].entry.digest else abs(one[0] - other[0])
        return math.inf if math.isnan(distance) else distance

    nearest = [(min(values_a, key=partial(apart, y)), y) for y in values_b]
    x, y = max(nearest, key=lambda both: (apart(*both), -both[1][1].source.rank))
    return x[1], y[1]


def _pair_loader(x: Item, y: Item) -> Callable[[], Assembled | Streamed]:
    return lambda: paired(one(x), one(y))
