"""When a step sets off a trigger, from statistics alone; expected values by hand."""

from __future__ import annotations

import math

import pytest

from tensortrace.tracer.flight_watch import Watch
from tensortrace.tracer.types import Entry, Kind, Stats, Triggered


def entry(event: int, kind: Kind, name: str, slot: str, stats: Stats) -> Entry:
    return Entry(
        event=event, step=0, microbatch=0, kind=kind, name=name, slot=slot, dtype="float32", local_shape=(),
        digest="00" * 16, stats=stats,
    )  # fmt: skip


def number(kind: Kind, value: float, name: str = "w", slot: str = "model", event: int = 0) -> Entry:
    """Return an entry of one number."""
    if math.isnan(value):
        stats = Stats(finite=0, nan=1)
    elif math.isinf(value):
        stats = Stats(finite=0, inf=1)
    else:
        stats = Stats(finite=1, mean=value)
    return entry(event, kind, name, slot, stats)


def step_of(watch: Watch, step: int, *entries: Entry) -> Triggered | None:
    for each in entries:
        watch.see(each)
    return watch.end_step(step)


NAN, INF = math.nan, math.inf


def after_one_finite(kind: Kind, value: float, *others: Entry) -> Triggered | None:
    watch = Watch(["nonfinite"], sees_updates=True)
    assert step_of(watch, 0, number(kind, 1.0)) is None
    return step_of(watch, 1, number(kind, value), *others)


@pytest.mark.parametrize(
    ("kind", "value", "fires"),
    [
        (Kind.PARAM, NAN, True), (Kind.PARAM, INF, True), (Kind.OPTIMIZER_STATE, INF, True),
        (Kind.LOSS, NAN, True), (Kind.LOSS, INF, True),
        (Kind.ACTIVATION, NAN, True), (Kind.ACTIVATION, INF, False),
        (Kind.BUFFER, NAN, True), (Kind.BUFFER, INF, False),
        (Kind.INPUT, NAN, False), (Kind.COLLECTIVE, NAN, False), (Kind.RNG, NAN, False),
    ],
)  # fmt: skip
def test_which_kinds_count(kind: Kind, value: float, fires: bool) -> None:
    """An infinite activation may be a mask; what is given is not computed."""
    assert (after_one_finite(kind, value) is not None) == fires


def skipped(value: float) -> Entry:
    return number(Kind.SCHEDULE, value, name="optimizer.0", slot="skipped", event=9)


@pytest.mark.parametrize(
    ("updates", "fires"), [([0.0], True), ([1.0], False), ([0.0, 1.0], False), ([], False)]
)
def test_gradients_count_where_every_optimizer_used_them(updates: list[float], fires: bool) -> None:
    found = after_one_finite(Kind.REDUCED_GRAD, INF, *map(skipped, updates))
    assert (found is not None) == fires


def test_gradients_count_always_where_updates_are_not_recorded() -> None:
    watch = Watch(["nonfinite"], sees_updates=False)
    assert step_of(watch, 0, number(Kind.LOCAL_GRAD, 1.0)) is None
    assert step_of(watch, 1, number(Kind.LOCAL_GRAD, NAN)) is not None


def test_what_never_was_finite_is_no_trigger_unless_it_is_a_loss() -> None:
    watch = Watch(["nonfinite"], sees_updates=True)
    assert step_of(watch, 0, number(Kind.PARAM, INF, "mask")) is None
    assert step_of(watch, 1, number(Kind.PARAM, 0.0, "mask")) is None
    assert step_of(watch, 2, number(Kind.PARAM, INF, "mask")) is None
    assert step_of(watch, 3, number(Kind.LOSS, NAN)) is not None


def test_a_scaled_loss_may_overflow_in_a_skipped_step() -> None:
    root = number(Kind.LOSS, INF, name="backward", slot="value")
    assert step_of(Watch(["nonfinite"], sees_updates=True), 0, root, skipped(1.0)) is None
    assert step_of(Watch(["nonfinite"], sees_updates=True), 0, root, skipped(0.0)) is not None


def test_the_first_in_order_of_events_is_told() -> None:
    watch = Watch(["nonfinite"], sees_updates=True)
    names = ("a", "b")
    step_of(watch, 0, *(number(Kind.ACTIVATION, 1.0, name) for name in names))
    late, early = number(Kind.ACTIVATION, NAN, "a", event=8), number(Kind.ACTIVATION, NAN, "b", event=7)
    found = step_of(watch, 1, late, early)
    assert found is not None
    assert (found.trigger, found.step, found.event, found.name) == ("nonfinite", 1, 7, "b")
    assert found.text == "1 NaN of 1 element"


def losses(watch: Watch, values: list[float]) -> list[int]:
    """Return the steps that set off a trigger; a loss is a sum over four tokens."""
    fired = []
    for step, value in enumerate(values):
        parts = (number(Kind.LOSS, 4 * value, "ce", "sum"), number(Kind.LOSS, 4.0, "ce", "count"))
        if step_of(watch, step, *parts) is not None:
            fired.append(step)
    return fired


@pytest.mark.parametrize(("loss", "fires"), [(4.9, False), (5.0, True)])
def test_a_spike_is_so_many_spreads_above_the_median(loss: float, fires: bool) -> None:
    """Losses 1, 2, 3 in turn over 18 steps: m = 2, s = 1.4826 · 1; with K = 2 the limit is 4.9652."""
    known = [1.0, 2.0, 3.0] * 6
    assert losses(Watch(["loss-spike:2"], sees_updates=True), [*known, loss]) == [18] * fires


def test_losses_that_hardly_move_have_a_least_spread() -> None:
    """m = 2, s = 0.01 · 2, K = 10: the limit is 2.2."""
    watch = Watch(["loss-spike"], sees_updates=True)
    assert losses(watch, [2.0] * 16 + [2.19, 2.21]) == [17]


def test_no_spike_is_seen_before_eight_steps() -> None:
    assert losses(Watch(["loss-spike"], sees_updates=True), [1.0] * 7 + [99.0]) == []
    assert losses(Watch(["loss-spike"], sees_updates=True), [1.0] * 8 + [99.0]) == [8]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_that_is_not_known_is_what_backward_starts_from_unless_scaled(scaled: bool) -> None:
    """A scale that doubles would look like a spike."""
    watch = Watch(["loss-spike"], sees_updates=True)
    scale = [number(Kind.SCHEDULE, 2.0, "scaler.0", "scale")] * scaled
    found = [
        step_of(watch, step, number(Kind.LOSS, value, "backward", "value"), *scale)
        for step, value in enumerate([1.0] * 8 + [2.0])
    ]
    assert [each is not None for each in found] == [False] * 8 + [not scaled]


def test_only_the_triggers_asked_for_are_watched() -> None:
    assert losses(Watch(["nonfinite"], sees_updates=True), [1.0] * 16 + [99.0]) == []
    assert losses(Watch(["loss-spike"], sees_updates=True), [NAN] * 3) == []
