"""Closed forms against torch's own schedulers, of which they are independent, and against numbers by hand."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tensortrace.replay.schedules import Settings, closed_form
from tensortrace.tracer.hooks.schedule import settings_of_scheduler

L = torch.optim.lr_scheduler

Made = Callable[[torch.optim.Optimizer], Any]


def scheduler_of(make: Made) -> Any:
    return make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))


def settings(scheduler: Any, position: int) -> Settings:
    text = settings_of_scheduler(scheduler, 0)
    return Settings.of(type(scheduler).__name__, position, text)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: L.StepLR(o, 3, 0.5),
        lambda o: L.MultiStepLR(o, [2, 5, 5], 0.3),
        lambda o: L.ConstantLR(o, 0.25, 4),
        lambda o: L.LinearLR(o, 0.2, 0.9, 6),
        lambda o: L.ExponentialLR(o, 0.8),
        lambda o: L.PolynomialLR(o, 7, 2.0),
        lambda o: L.CosineAnnealingLR(o, 6, 0.01),
        lambda o: L.CosineAnnealingWarmRestarts(o, 2, 2, 0.01),
        lambda o: L.CosineAnnealingWarmRestarts(o, 3),
        lambda o: L.CyclicLR(o, 0.01, 0.2, 3, 2, mode="triangular"),
        lambda o: L.CyclicLR(o, 0.01, 0.2, 2, mode="triangular2"),
        lambda o: L.CyclicLR(o, 0.01, 0.2, 2, mode="exp_range", gamma=0.9),
        lambda o: L.OneCycleLR(o, 0.2, total_steps=14),
        lambda o: L.OneCycleLR(o, 0.2, total_steps=14, anneal_strategy="linear", three_phase=True),
    ],
)
def test_the_rate_at_every_position_is_torchs(make: Made) -> None:
    scheduler = scheduler_of(make)
    values = {k: v for k, v in scheduler.optimizer.param_groups[0].items() if isinstance(v, float)}
    for position in range(13):
        rate = closed_form(settings(scheduler, position), 0, values)
        assert rate == pytest.approx(scheduler.optimizer.param_groups[0]["lr"], rel=1e-12)
        scheduler.optimizer.step()
        scheduler.step()


def test_settings_may_be_numbers_of_a_class_of_their_own() -> None:
    class Words(str):
        pass

    scheduler = scheduler_of(lambda o: L.CosineAnnealingLR(o, 10, np.float64(0.02)))
    scheduler.base_lrs = [np.float64(0.1)]  # as they are where a program computes its rate with numpy
    scheduler.called = Words("mine")
    assert closed_form(settings(scheduler, 5), 0, {}) == pytest.approx((0.1 + 0.02) / 2)
    assert settings(scheduler, 5).words["called"] == "mine"


@pytest.mark.parametrize(
    "odd",
    [
        math.inf, math.nan, 10**400, None, abs, object(), [math.nan], [None], [[1]], Counter({"a": 1}),
        Counter({3: 10**9}), Counter({3: 2**70}), np.arange(3), torch.ones(1), 1j, b"x", {1: 2},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_written_down_are_left_out(odd: object) -> None:
    scheduler = scheduler_of(lambda o: L.CosineAnnealingLR(o, 10, 0.02))
    before = settings(scheduler, 5)
    scheduler.odd = odd
    assert settings(scheduler, 5) == before


def test_settings_that_json_has_another_form_for_are_written_down() -> None:
    class Mode(str, enum.Enum):  # noqa: UP042  # as programs write it that are older than StrEnum
        WARM = "warm"

    scheduler = scheduler_of(lambda o: L.MultiStepLR(o, [np.int64(2), 2, np.int32(5)], Fraction(1, 4)))
    scheduler.mode, scheduler.large, scheduler.word = Mode.WARM, 2**70, "a\ud800"
    found = settings(scheduler, 4)
    assert found.lists["milestones"] == [2.0, 2.0, 5.0]
    assert found.numbers["gamma"] == 0.25
    assert found.numbers["large"] == 2.0**70
    assert found.words == {"mode": "warm", "word": r"a\ud800"}
    assert closed_form(found, 0, {}) == 0.1 / 16


def test_more_settings_than_are_wanted_are_not_gone_through() -> None:
    scheduler = scheduler_of(lambda o: L.CosineAnnealingLR(o, 10, 0.02))
    scheduler.table = [0.5] * 2001
    assert settings_of_scheduler(scheduler, 0) is None


def test_settings_of_a_trace_that_has_null_for_infinity_are_read() -> None:
    found = Settings.of("ReduceLROnPlateau", 0, '{"optimizer":1,"best":null,"list":[1,null],"factor":0.5}')
    assert found.numbers == {"optimizer": 1.0, "factor": 0.5}
    assert found.lists == {}


def test_half_a_cosine_down_the_rate_is_in_the_middle() -> None:
    scheduler = scheduler_of(lambda o: L.CosineAnnealingLR(o, 10, 0.02))
    assert closed_form(settings(scheduler, 5), 0, {}) == pytest.approx((0.1 + 0.02) / 2)


@pytest.mark.parametrize(
    "make", [lambda o: L.LambdaLR(o, lambda n: 0.5**n), lambda o: L.ReduceLROnPlateau(o)]
)
def test_what_has_no_closed_form_is_not_guessed(make: Made) -> None:
    assert closed_form(settings(scheduler_of(make), 1), 0, {}) is None


@pytest.mark.parametrize(
    "text",
    [
        None, "", "[]", '{"base_lrs": "x"}', '{"base_lrs": [0.1], "gamma": 0.5, "step_size": 0}', "{" * 5000,
        '{"base_lrs": [0.1], "gamma": 1e308, "step_size": 1}',
        '{"base_lrs": [1e999], "gamma": 2, "step_size": 1}',
    ],
)  # fmt: skip
def test_settings_that_are_damaged_give_no_rate(text: str | None) -> None:
    rate = closed_form(Settings.of("StepLR", 9, text), 0, {})
    assert rate is None or not math.isfinite(rate) or rate == 0
