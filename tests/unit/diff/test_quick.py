"""What is measured quickly is what is measured exactly, to six digits."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import measure
from tensortrace.diff.quick import measure_quickly
from tensortrace.diff.tolerance import measure_peak

EPS = 2.0**-23
SHAPES = [(8, 33, 64), (300, 40), (6, 5000), (5000, 64), (1 << 13,)]


def pair(shape: tuple[int, ...], size: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a = (size * rng.standard_normal(shape)).astype(np.float32)
    return a, (a * (1 + noise * (0.3 + rng.standard_normal(shape)))).astype(np.float32)


@pytest.mark.parametrize("noise", [3e-7, 1e-2])
@pytest.mark.parametrize("size", [1.0, 1e-12, 3e8])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_measures_what_the_exact_functions_do(shape: tuple[int, ...], size: float, noise: float) -> None:
    a, b = pair(shape, size, noise)
    quick = measure_quickly(shape, lambda: [(a, b)], eps=EPS, spacing=EPS, terms=0.0)
    metrics = measure(a, b, eps=EPS)
    assert quick is not None
    for name in ("rel_l2", "abs_l2", "norm_a", "norm_b", "projection_error"):
        assert getattr(quick.metrics, name) == pytest.approx(getattr(metrics, name), rel=3e-6), name
    assert metrics.projection is not None
    assert quick.metrics.projection == pytest.approx(metrics.projection, abs=3e-6 * (metrics.rel_l2 or 0))
    assert quick.peak == pytest.approx(measure_peak([(a, b)], metrics, 0.0), rel=1e-6)
    expected = measure_coherence(shape, [(a, b)], metrics.projection, EPS)
    assert expected is not None
    assert quick.coherence == pytest.approx(expected, rel=1e-4)


def test_blocks_of_rows_are_one_tensor() -> None:
    a, b = pair((300, 40), 1.0, 1e-6)
    whole = measure_quickly(a.shape, lambda: [(a, b)], eps=EPS, spacing=EPS, terms=100.0)
    parts = measure_quickly(
        a.shape, lambda: [(a[:7], b[:7]), (a[7:], b[7:])], eps=EPS, spacing=EPS, terms=100.0
    )
    assert whole is not None
    assert parts is not None
    assert parts.peak == pytest.approx(whole.peak)
    assert parts.metrics.rel_l2 == pytest.approx(whole.metrics.rel_l2)
    assert parts.coherence == pytest.approx(whole.coherence, rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_or_cannot_be_squared_is_left_to_the_exact_functions(
    value: float, side: int
) -> None:
    sides = pair((300, 40), 1.0, 1e-6)
    sides[side][299, 39] = value
    assert measure_quickly((300, 40), lambda: [sides], eps=EPS, spacing=EPS, terms=0.0) is None


def test_equal_tensors_are_said_to_be_equal() -> None:
    a, _ = pair((300, 40), 1.0, 0.0)
    quick = measure_quickly(a.shape, lambda: [(a, a.astype(np.float64))], eps=EPS, spacing=EPS, terms=0.0)
    assert quick is not None
    assert quick.metrics.equal
    assert quick.metrics.norm_b == pytest.approx(float(np.linalg.norm(a.astype(np.float64))), rel=1e-6)


def test_a_difference_whose_square_is_nothing_in_float32_is_no_equality() -> None:
    a, _ = pair((300, 40), 1.0, 0.0)
    b = a.astype(np.float64)
    b[7, 7] += 1e-30
    assert measure_quickly(a.shape, lambda: [(np.zeros_like(b) + a, b)], eps=EPS, spacing=EPS, terms=0.0)
    b = a.copy()
    a[7, 7], b[7, 7] = 1e-30, 2e-30
    assert measure_quickly(a.shape, lambda: [(a, b)], eps=EPS, spacing=EPS, terms=0.0) is None


def test_zeros_are_left_to_the_exact_functions() -> None:
    a, _ = pair((300, 40), 1.0, 0.0)
    zeros = np.zeros_like(a)
    assert measure_quickly(a.shape, lambda: [(zeros, a)], eps=EPS, spacing=EPS, terms=0.0) is None


@pytest.mark.parametrize("size", [1.0, 1e-12, 3e8])
def test_a_sum_in_float64_is_rounded_only_after_it_is_subtracted(size: float) -> None:
    """The difference is a thousandth of what float32 tells apart."""
    a, _ = pair((300, 40), size, 0.0)
    noise = 1e-10 * np.random.default_rng(5).standard_normal(a.shape)
    wide = a.astype(np.float64) * (1 + noise)
    quick = measure_quickly(a.shape, lambda: [(wide, a)], eps=EPS, spacing=EPS, terms=0.0)
    assert quick is not None
    assert quick.metrics.rel_l2 == pytest.approx(measure(wide, a, eps=EPS).rel_l2, rel=3e-6)


@pytest.mark.parametrize("wrong", [1.0, 1.001, 1e30])
def test_a_norm_that_is_known_saves_a_pass_and_one_that_is_wrong_does_no_harm(wrong: float) -> None:
    a, b = pair((300, 40), 1.0, 1e-6)
    passes = []

    def blocks() -> list[tuple[np.ndarray, np.ndarray]]:
        passes.append(1)
        return [(a, b)]

    expected = measure_quickly(a.shape, lambda: [(a, b)], eps=EPS, spacing=EPS, terms=0.0)
    norm = wrong * float(np.linalg.norm(a.astype(np.float64)))
    found = measure_quickly(a.shape, blocks, eps=EPS, spacing=EPS, terms=0.0, norm=norm)
    assert found is not None
    assert expected is not None
    assert found.peak == pytest.approx(expected.peak, rel=1e-6)
    assert found.metrics.rel_l2 == expected.metrics.rel_l2
    assert len(passes) == (1 if wrong == 1.0 else 2 if wrong == 1e30 else 3)


def test_other_dtypes_are_left_to_the_exact_functions() -> None:
    a, b = pair((300, 40), 1.0, 1e-6)
    sides = a.astype(np.float16), b.astype(np.float16)
    assert measure_quickly(a.shape, lambda: [sides], eps=EPS, spacing=EPS, terms=0.0) is None
