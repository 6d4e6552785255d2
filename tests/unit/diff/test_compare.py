"""Metrics of two tensors, against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensortrace.diff.compare import measure, measure_blocks


def test_the_relative_error_and_the_worst_element_are_those_worked_by_hand() -> None:
    found = measure(np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[3.0, 4.5], [0.0, 0.0]]))
    assert found.rel_l2 == pytest.approx(0.1)  # 0.5 / 5
    assert found.max_abs == 0.5
    assert found.max_abs_at == (0, 1)
    assert (found.max_abs_a, found.max_abs_b) == (4.0, 4.5)
    assert found.max_rel == pytest.approx(0.125)
    assert found.projection == pytest.approx((9 + 18) / 25)


def test_a_common_factor_has_no_standard_error() -> None:
    a = np.arange(1.0, 9.0)
    found = measure(a, 1.04 * a)
    assert found.projection == pytest.approx(1.04)
    assert found.projection_error == pytest.approx(0, abs=1e-12)
    assert found.cosine == pytest.approx(1)


def test_nan_and_infinity_at_the_same_places_are_equal() -> None:
    a = np.array([np.nan, np.inf, -np.inf, 1.0])
    found = measure(a, a.copy())
    assert found.equal
    assert found.nonfinite_a == found.nonfinite_b == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_another_pattern_of_nan_or_infinity_is_infinitely_far(bad: float) -> None:
    found = measure(np.array([1.0, 2.0, 3.0]), np.array([1.0, bad, 3.0]))
    assert found.rel_l2 == math.inf
    assert found.max_abs_at == (1,)
    assert (found.nonfinite_a, found.nonfinite_b) == (0, 1)


def test_opposite_infinities_differ() -> None:
    assert measure(np.array([np.inf]), np.array([-np.inf])).rel_l2 == math.inf


def test_an_element_that_is_zero_in_a_overflows_nothing() -> None:
    found = measure(np.array([0.0, 1.0]), np.array([1e30, 1.0]))
    assert found.max_abs == 1e30
    assert found.max_rel is None or found.max_rel > 1


def test_tensors_without_elements_are_equal() -> None:
    assert measure(np.zeros((0, 3)), np.zeros((0, 3))).equal


def test_complex_numbers_are_compared_as_pairs() -> None:
    found = measure(np.array([3 + 4j]), np.array([3 + 4.5j]))
    assert found.rel_l2 == pytest.approx(0.1)


@pytest.mark.parametrize("error", [0.0, 1e-6, 0.3])
def test_blocks_give_the_metrics_of_the_whole(error: float) -> None:
    rng = np.random.default_rng(3)
    a = rng.normal(size=(700, 1000)).astype(np.float32)  # more than one chunk
    b = a * 1.001 + error * rng.normal(size=a.shape)
    b[:200] = a[:200]  # chunks in which nothing differs
    a[5, 6] = b[5, 6] = np.nan
    b[650, 7] += 9
    a[651, 8] = 1e-9
    whole = measure(a, b)
    pieces = measure_blocks(a.shape, [(a[k : k + 90], b[k : k + 90]) for k in range(0, 700, 90)])
    x, y = np.nan_to_num(a.astype(np.float64)), np.nan_to_num(b)
    delta = y - x
    rest = delta - x * (x * delta).sum() / (x * x).sum()
    for found in (whole, pieces):
        assert found.rel_l2 == pytest.approx(np.linalg.norm(delta) / np.linalg.norm(x), rel=1e-12)
        assert found.projection == pytest.approx(1 + (x * delta).sum() / (x * x).sum(), rel=1e-12)
        assert found.projection_error == pytest.approx(np.linalg.norm(x * rest) / (x * x).sum(), rel=1e-9)
        assert found.max_abs_at == (650, 7)
        assert found.max_rel_at == (651, 8)
        assert (found.nonfinite_a, found.nonfinite_b, found.elements) == (1, 1, 700_000)


def test_the_first_broken_element_is_named_over_blocks() -> None:
    a = np.zeros((4, 3))
    b = a.copy()
    b[2, 1] = b[3, 0] = np.nan
    found = measure_blocks((4, 3), [(a[:1], b[:1]), (a[1:], b[1:])])
    assert (found.rel_l2, found.max_abs_at, found.nonfinite_b) == (math.inf, (2, 1), 2)
