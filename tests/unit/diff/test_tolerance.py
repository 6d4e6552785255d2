"""What the error model and the floor allow, against limits worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, measure, summed_error
from tensortrace.diff.floors import Floor
from tensortrace.diff.result import Judgement
from tensortrace.diff.tolerance import (
    SIGMAS,
    Error,
    Measured,
    inherited,
    judge_exact,
    judge_model,
    judge_own,
    measure_peak,
    measure_unexplained,
)

SINGLE = EPS["float32"]


def measured(a: np.ndarray, b: np.ndarray, terms: float = 0.0, eps: float = SINGLE) -> Measured:
    metrics = measure(a, b)
    coherence = measure_coherence(a.shape, [(a, b)], metrics.projection, eps)
    return Measured(metrics, measure_peak([(a, b)], metrics, terms), terms, coherence=coherence)


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


def on_floor(noise: float, floor: Floor, elements: int = 64) -> Judgement:
    a = np.random.default_rng(8).normal(size=elements)
    error = np.random.default_rng(9).normal(size=elements)
    b = a + error * (noise * np.linalg.norm(a) / np.linalg.norm(error))
    return judge_model(measured(a, b), SINGLE, [], floor=floor)


@pytest.mark.parametrize(("runs", "factor"), [(1, 8.7), (2, 4.0), (3, 3.1), (5, 2.7), (7, 2.3), (100, 1.8)])
def test_the_more_floor_runs_the_less_above_them_is_still_noise(runs: int, factor: float) -> None:
    floor = Floor(runs, 1e-4, 1.0, 1e-4)
    assert on_floor(0.98e-4 * factor, floor).ratio <= 1
    assert on_floor(1.02e-4 * factor, floor).ratio > 1
    assert on_floor(1e-4, floor).policy == "floor"
    assert on_floor(1e-4, floor).floor_runs == runs


def test_a_floor_below_round_off_or_of_none_leaves_the_error_model_to_decide() -> None:
    for floor in (Floor(3, 1e-9, 1e-8, 1e-10), Floor(3, 0.0, 0.0, 0.0)):
        judged = on_floor(1e-7, floor)
        assert judged.policy == "error-model"
        assert judged.ratio <= 1
        assert on_floor(1e-4, floor).ratio > 1


def test_a_floor_of_few_runs_is_too_thin_for_a_number_alone() -> None:
    judged = on_floor(1e-4, Floor(3, 1e-4, 1e-4, 1e-4), elements=1)
    assert judged.ratio > 1
    assert "too thin" in judged.reason
    assert on_floor(3e-4, Floor(24, 1e-4, 1e-4, 1e-4), elements=1).ratio <= 1


def test_exact_values_that_identical_code_has_otherwise_are_not_judged_exactly() -> None:
    metrics = measure(np.array([1.0]), np.array([2.0]))
    assert judge_exact(metrics, Floor(2, 0.0, 0.0, 0.0)).ratio == math.inf
    assert judge_exact(metrics, Floor(2, 0.5, 1.0, 0.5)).ratio == 0


def test_the_floor_and_the_error_are_relative_to_the_same_terms() -> None:
    a, b = np.full(8, 1e-6), np.full(8, 2e-6)
    found = measured(a, b, terms=math.sqrt(8))
    assert found.error == pytest.approx(1e-6)
    assert judge_model(found, SINGLE, [], floor=Floor(1, 1e-6, 1e-6, 1e-6)).ratio <= 1


def own(unexplained: list[float], sizes: list[float]) -> float:
    found = measure_unexplained([(np.array(unexplained), np.array(sizes))])
    return judge_own(found, SINGLE).ratio


def test_what_an_update_s_inputs_do_not_explain_is_judged_element_by_element() -> None:
    assert own([0.0, 30 * SINGLE * 1e-2], [1.0, 1e-2]) <= 1
    assert own([0.0, 70 * SINGLE * 1e-2], [1.0, 1e-2]) > 1


def test_an_unexplained_nan_is_infinitely_wrong_and_a_nan_size_is_no_licence() -> None:
    assert own([np.nan], [1.0]) == math.inf
    assert own([0.0, 1e-3], [np.nan, 1.0]) > 1


BRAIN, HALF = EPS["bfloat16"], EPS["float16"]


def rounded(values: np.ndarray, eps: float, how: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return values with their mantissa rounded to a spacing of ``eps`` in one of the ways numpy has."""
    spacing = eps * np.exp2(np.floor(np.log2(np.abs(values))))
    return how(values / spacing) * spacing


@pytest.mark.parametrize("eps", [BRAIN, HALF, SINGLE])
@pytest.mark.parametrize("shape", [(64, 256), (4096,), (3, 5, 7)])
def test_a_kernel_that_truncates_its_result_is_legal(eps: float, shape: tuple[int, ...]) -> None:
    # it shrinks every element by half a unit in the mean: one common factor, below the least of its bound
    exact = np.random.default_rng(3).normal(size=shape)
    nearest, truncated = rounded(exact, eps, np.rint), rounded(exact, eps, np.trunc)
    for a, b in ((nearest, truncated), (truncated, nearest)):
        found = measured(a, b, eps=eps)
        assert found.factor == pytest.approx(0.33 * eps, rel=0.3)  # E|x|·ulp/2 over E x²: see the docs
        assert judge_model(found, eps, []).ratio <= 1


@pytest.mark.parametrize("eps", [BRAIN, HALF])
def test_a_number_in_every_element_may_be_rounded_up_in_one_run(eps: float) -> None:
    a, b = np.full((64, 64), 1.0), np.full((64, 64), 1.0 + eps)
    assert judge_model(measured(a, b, eps=eps), eps, []).ratio <= 1


def test_a_factor_of_half_a_percent_is_found_under_the_rounding_of_bfloat16() -> None:
    exact = np.random.default_rng(4).normal(size=(64, 64))
    noise = 0.004 * np.random.default_rng(5).normal(size=exact.shape) * np.abs(exact)
    a, b = rounded(exact, BRAIN, np.rint), rounded(exact + noise, BRAIN, np.rint)
    scaled = rounded(1.005 * (exact + noise), BRAIN, np.rint)
    inputs = [Error(rel=0.004, coherent=1e-4)]
    correct, wrong = (judge_model(measured(a, y, eps=BRAIN), BRAIN, inputs) for y in (b, scaled))
    assert correct.ratio < 0.5
    assert wrong.ratio > 1
    assert wrong.error == pytest.approx(0.005, abs=5e-4)
    assert wrong.power_coherent is not None
    assert wrong.noise is not None
    assert wrong.noise > 0.03  # in L2 the two are as good as equal: 0.005 and 0.007
    assert measured(a, scaled).error < 2 * measured(a, b).error


def test_an_error_of_a_column_is_no_common_factor_of_the_whole() -> None:
    # each column has an error of its own, the same in every row: elements are not independent
    rng = np.random.default_rng(6)
    a = np.abs(rng.normal(size=(400, 16)))
    b = a * (1 + 1e-3 * rng.normal(size=16))
    found = measured(a, b)
    assert found.coherence.spread == pytest.approx(1e-3 / 4, rel=0.8)  # σ/√columns; elements: 20 times less
    assert found.factor < SIGMAS * found.coherence.spread


def test_the_power_says_what_would_have_been_found() -> None:
    rng = np.random.default_rng(7)
    a = rng.normal(size=(50, 40))
    b = a * (1 + 1e-7 * rng.normal(size=a.shape)) * (1 + 2e-7)
    power = judge_model(measured(a, b), SINGLE, [])
    assert power.power_coherent is not None
    assert power.power_incoherent is not None
    for sign in (1, -1):
        assert judge_model(measured(a, b * (1 + sign * 1.01 * power.power_coherent)), SINGLE, []).ratio > 1
    noise = rng.normal(size=a.shape)
    noise *= 1.01 * power.power_incoherent * np.linalg.norm(a) / np.linalg.norm(noise)
    assert judge_model(measured(a, b + noise), SINGLE, []).ratio > 1


def test_what_one_number_is_off_by_is_no_common_factor() -> None:
    """The gradients of the biases of two classes are one number and its negative."""
    few, many = np.array([0.0142, -0.0142, 0.0142]), np.linspace(0.01, 0.02, 8)
    assert measure_coherence((3,), [(few, few * 1.017)], 1.017, 2.0**-7) is None
    assert measure_coherence((8,), [(many, many * 1.017)], 1.017, 2.0**-7) is not None
