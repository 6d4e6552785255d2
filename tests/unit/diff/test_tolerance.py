"""What the error model and the floor allow, against limits worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensortrace.diff.compare import EPS, measure, summed_error
from tensortrace.diff.tolerance import (
    Error,
    Measured,
    inherited,
    judge_exact,
    judge_floor,
    judge_model,
    judge_own,
    measure_peak,
)

SINGLE = EPS["float32"]


def measured(a: np.ndarray, b: np.ndarray, terms: float = 0.0) -> Measured:
    metrics = measure(a, b)
    return Measured(metrics, measure_peak([(a, b)], metrics, terms), terms)


def noisy(relative: float) -> Measured:
    rng = np.random.default_rng(0)
    a = rng.normal(size=4096)
    return measured(a, a * (1 + relative * rng.normal(size=a.size)))


def test_round_off_is_allowed_and_a_hundred_times_as_much_is_not() -> None:
    assert judge_model(noisy(SINGLE), SINGLE, []).ratio <= 1
    assert judge_model(noisy(100 * SINGLE), SINGLE, []).ratio > 1


def test_an_error_that_the_inputs_have_may_be_amplified_fourfold() -> None:
    inputs = [Error(1e-3, 4e-3)]
    assert judge_model(noisy(3e-3), SINGLE, inputs).ratio <= 1
    assert judge_model(noisy(6e-3), SINGLE, inputs).ratio > 1


def test_an_error_that_all_rows_share_adds_up_in_their_sum() -> None:
    # 100 rows of 4 elements, each 1: an error of 1e-6 in one column, of one sign or of both in turn
    a = np.ones((10, 10, 4))
    shared, turned = a.copy(), a.copy()
    shared[..., 2] += 1e-6
    turned[..., 2] += 1e-6 * (-1.0) ** np.arange(10)
    norm = math.sqrt(400)
    assert summed_error(a, shared) == pytest.approx(100e-6, rel=1e-9)
    assert summed_error(a, turned) == pytest.approx(0, abs=1e-12)
    # in L2 the error is 10 times 1e-6: the sum inherits ten times as much
    inherits = Error(rel=10e-6 / norm, together=summed_error(a, shared) / norm)
    assert inherits.of_sum().rel == pytest.approx(10 * inherits.rel)
    assert Error(rel=1e-6).of_sum() == Error(rel=1e-6)


def test_a_coherent_factor_far_below_the_noise_is_found() -> None:
    # noise of 1e-5 on a million elements: a factor of 1.0001 is 10,000 standard errors
    rng = np.random.default_rng(1)
    a = rng.normal(size=1_000_000)
    noise = 1e-5 * rng.normal(size=a.size)
    correct = judge_model(measured(a, a + noise), SINGLE, [Error(1e-6, 1e-4)])
    scaled = judge_model(measured(a, 1.0001 * a), SINGLE, [Error(1e-6, 1e-4)])
    assert scaled.ratio > 1
    assert "common factor" in scaled.reason
    assert "common factor" not in correct.reason


def test_one_wrong_element_in_a_million_is_found_by_its_own_size() -> None:
    rng = np.random.default_rng(2)
    a = rng.normal(size=1_000_000)
    b = a.copy()
    b[77] *= 1 + 1e-3
    b[77] += 1e-3
    judged = judge_model(measured(a, b), SINGLE, [])
    assert judged.ratio > 1
    assert "worst element" in judged.reason


def test_a_result_that_cancels_is_compared_with_the_terms_that_cancelled() -> None:
    a, b = np.full(4, 1e-9), np.full(4, 2e-9)
    assert judge_model(measured(a, b), SINGLE, []).ratio > 1
    assert judge_model(measured(a, b, terms=1.0), SINGLE, []).ratio <= 1


def test_independent_errors_of_inputs_add_in_squares() -> None:
    assert inherited([Error(3e-4), Error(4e-4)]).rel == pytest.approx(5e-4)
    assert inherited([]).rel == 0


def test_exactly_compared_values_may_not_differ_at_all() -> None:
    assert judge_exact(measure(np.array([1.0]), np.array([1.0]))).ratio == 0
    assert judge_exact(measure(np.array([1.0]), np.array([1.0 + 1e-15]))).ratio == math.inf


@pytest.mark.parametrize(("runs", "factor"), [(1, 10), (2, 5), (3, 3), (7, 3)])
def test_the_more_floor_runs_the_less_above_them_is_still_noise(runs: int, factor: float) -> None:
    a = np.array([1.0, 0.0])
    floors = [1e-4] * runs
    assert judge_floor(measured(a, a * (1 + 0.9e-4 * factor)), floors, []).ratio <= 1
    assert judge_floor(measured(a, a * (1 + 1.1e-4 * factor)), floors, []).ratio > 1


def test_what_the_inputs_differ_by_is_allowed_above_a_lucky_floor() -> None:
    a = np.array([1.0, 0.0])
    found = measured(a, a * (1 + 1e-3))
    assert judge_floor(found, [1e-6, 1e-6, 1e-6], []).ratio > 1
    assert judge_floor(found, [1e-6, 1e-6, 1e-6], [Error(1e-3)]).ratio <= 1


def test_the_floor_and_the_error_are_relative_to_the_same_terms() -> None:
    a, b = np.array([1e-6]), np.array([2e-6])
    found = measured(a, b, terms=1.0)
    assert found.error == pytest.approx(1e-6)
    assert judge_floor(found, [1e-6], []).ratio <= 1


def own(unexplained: list[float], sizes: list[float]) -> float:
    return judge_own(lambda: [(np.array(unexplained), np.array(sizes))], SINGLE).ratio


def test_what_an_update_s_inputs_do_not_explain_is_judged_element_by_element() -> None:
    assert own([0.0, 60 * SINGLE * 1e-2], [1.0, 1e-2]) <= 1
    assert own([0.0, 70 * SINGLE * 1e-2], [1.0, 1e-2]) > 1


def test_an_unexplained_nan_is_infinitely_wrong_and_a_nan_size_is_no_licence() -> None:
    assert own([np.nan], [1.0]) == math.inf
    assert own([0.0, 1e-3], [np.nan, 1.0]) > 1
