"""A hypothesis is a cause only if applying it to the reference leaves nothing of the difference."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.causes.case import Proposal, settle


class Case:
    """Stands for an origin whose judgement allowed 1e-6."""

    floor = 1e-6


def settled(mistaken: list[float], actual: list[float], reference: list[float], floor: float = 0.0) -> object:
    sides = ([np.array(side)] for side in (mistaken, actual, reference))
    return settle(Case(), Proposal("some.code", "text", *sides, 1.0, "one", floor=floor))  # type: ignore[arg-type]


def test_a_hypothesis_that_explains_the_difference_is_a_cause() -> None:
    cause = settled([2.0, 4.0], [2.0, 4.0], [1.0, 2.0])
    assert cause is not None
    assert cause.residual_before == pytest.approx(0.5)  # type: ignore[attr-defined]
    assert cause.residual_after == 0.0  # type: ignore[attr-defined]


def test_a_hypothesis_that_leaves_more_than_the_floor_is_none() -> None:
    assert settled([2.0, 4.01], [2.0, 4.0], [1.0, 2.0]) is None
    assert settled([2.0, 4.01], [2.0, 4.0], [1.0, 2.0], floor=1e-2) is not None


def test_a_hypothesis_that_explains_nothing_that_was_there_is_none() -> None:
    assert settled([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]) is None


def test_equal_infinities_and_nans_are_no_difference() -> None:
    assert settled([np.inf, np.nan], [np.inf, np.nan], [1.0, 2.0]) is not None
    assert settled([np.nan, 2.0], [np.inf, 2.0], [1.0, 2.0]) is None


def test_tensors_of_other_shapes_explain_nothing() -> None:
    assert settled([2.0], [2.0, 4.0], [1.0, 2.0]) is None


def test_what_many_hypotheses_leave_of_one_number_is_chance() -> None:
    sides = ([np.array([2.0])], [np.array([2.002])], [np.array([1.0])])
    one = Proposal("some.code", "text", *sides, floor=1e-2)
    many = Proposal("some.code", "text", *sides, floor=1e-2, tried=20)
    assert settle(Case(), one) is not None  # type: ignore[arg-type]
    assert settle(Case(), many) is None  # type: ignore[arg-type]


def test_a_number_fitted_to_one_element_explains_nothing() -> None:
    two, four = [np.array([2.0])], [np.array([2.0, 4.0, 6.0, 8.0])]
    assert settle(Case(), Proposal("some.code", "text", two, two, [np.array([1.0])], fitted=1)) is None  # type: ignore[arg-type]
    halves = [np.array([1.0, 2.0, 3.0, 4.0])]
    assert settle(Case(), Proposal("some.code", "text", four, four, halves, fitted=1)) is not None  # type: ignore[arg-type]
