"""How far a bfloat16 parameter may be from its formula: no further than it is rounded."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.catalog import Slot
from tensortrace.diff.compare import EPS
from tensortrace.diff.formulas.inputs import UpdateInputs
from tensortrace.diff.tolerance import judge_own, measure_unexplained
from tensortrace.replay.rounding import excess
from tensortrace.tracer.types import Kind

PARAM = Slot("window", Kind.PARAM, "w", "model", 0)
SPACING = 2.0**-7
"""Of bfloat16 between 1 and 2."""


def ratio(value: float, rate: float, dtype: str = "bfloat16", **hypers: float) -> float:
    """Return how far a parameter of 1 is from a step of SGD by a gradient of 1, over what is allowed."""
    inputs = UpdateInputs("SGD", np.ones(1), np.ones(1), {}, {}, {"lr": rate, **hypers}, dtype)
    beyond = excess(np.array([value]), np.array([1 - rate]), PARAM, inputs, dtype)
    return judge_own(measure_unexplained([beyond]), EPS[dtype]).ratio


def test_a_change_below_half_a_spacing_is_rounded_away() -> None:
    assert ratio(1.0, 1e-3) <= 1


def test_a_parameter_that_moves_where_the_change_is_rounded_away_is_off() -> None:
    assert ratio(1.0 - SPACING, 1e-3) > 1
    assert ratio(1.0 + SPACING, 1e-3) > 1


@pytest.mark.parametrize(("value", "right"), [(1.0 - SPACING, True), (1.0, False), (1 - 2 * SPACING, False)])
def test_a_change_of_a_spacing_moves_it_by_one(value: float, right: bool) -> None:
    assert (ratio(value, SPACING) <= 1) == right


def test_a_float32_parameter_is_judged_by_the_size_of_its_change() -> None:
    # a change of 1e-4, off by a thousandth of itself: 1e-7, less than a spacing and rounded away beside 1
    assert ratio(1 - 1.001e-4, 1e-4, "float32") <= 1
    # off by a hundredth: eight spacings
    assert ratio(1 - 1.01e-4, 1e-4, "float32") > 1
