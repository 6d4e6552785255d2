"""Estimates: what may be done to a tensor that is known by its sketch, and how good its numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from tensortrace.diff.catalog import Item
from tensortrace.diff.estimate import Estimate, alike, as_array, vectors
from tensortrace.diff.estimating import measure_estimates, scatter_by_rank
from tensortrace.diff.handclip import agree
from tensortrace.diff.logical import Unkept
from tensortrace.tracer.geometry import full_region
from tensortrace.tracer.sketching import numbers_of

SHAPE = (40, 24)


def _sketch(array: np.ndarray, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    flat = array.reshape(-1)
    return numbers_of(lambda m, n: flat[m:n], full_region(array.shape), array.shape, None, size)


def _estimate(array: np.ndarray) -> Estimate:
    return Estimate(_sketch(array), array.shape, float(np.linalg.norm(array)), _sketch)


def test_what_adds_weighs_and_scales_is_done_to_the_sketch() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, *SHAPE))
    known = 2.0 * as_array(_estimate(x)).astype(np.float64) - as_array(_estimate(y)) / np.float64(4) + x
    assert isinstance(known, Estimate)
    np.testing.assert_allclose(known.numbers, _sketch(3 * x - y / 4), atol=1e-9)


@pytest.mark.parametrize(
    "ask",
    [
        np.abs,
        np.sqrt,
        np.asarray,
        np.isfinite,
        np.max,
        np.sort,
        lambda x: x[0],
        lambda x: x * x,
        lambda x: x < 1,
        lambda x: x == x,
        lambda x: x**2,
        lambda x: 1 / x,
        float,
        bool,
        list,
        abs,
    ],
)
def test_what_takes_elements_is_refused(ask: Callable[[np.ndarray], object]) -> None:
    x = as_array(_estimate(np.ones(SHAPE)))
    with pytest.raises(Unkept, match="values were not stored"):
        ask(x)


def test_a_tensor_in_memory_is_sketched_where_it_meets_an_estimate() -> None:
    x, y = np.random.default_rng(1).standard_normal((2, *SHAPE))
    left, right = vectors([as_array(_estimate(x)), y])
    assert left @ right == pytest.approx(float(np.mean(_sketch(x) * _sketch(y))))
    with pytest.raises(Unkept):
        alike([as_array(_estimate(x)), y[:3]])


@pytest.mark.parametrize("rank_one", [False, True])
def test_the_error_lies_within_its_bar_in_95_of_100_estimates(rank_one: bool) -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(100):
        x = rng.standard_normal(SHAPE)
        delta = rng.standard_normal((SHAPE[0], 1)) * rng.standard_normal(SHAPE[1]) if rank_one else None
        delta = rng.standard_normal(SHAPE) if delta is None else delta
        y = x + delta * 10 ** rng.uniform(-5, 0)
        perm = rng.permutation(SHAPE[0])  # other signs
        found = measure_estimates(_estimate(x[perm]), _estimate(y[perm]))
        assert found.rel_l2 is not None
        assert found.rel_l2_error is not None
        inside += abs(found.rel_l2 - np.linalg.norm(y - x) / np.linalg.norm(x)) <= found.rel_l2_error
    assert inside >= 95


def test_the_bar_of_what_is_of_rank_one_is_wide_however_little_it_scatters_by_chance() -> None:
    alike = np.outer(np.ones(16), np.r_[np.ones(15), 1.1])  # of one row, say: no scatter at all
    variance = 2 / 256 + (2 / 16 + 2 / 16 + 4 / 256)
    assert scatter_by_rank(alike) == pytest.approx(math.sqrt(variance), rel=1e-3)
    of_noise = [scatter_by_rank(x) for x in np.random.default_rng(4).standard_normal((50, 16, 16))]
    assert np.median(of_noise) == pytest.approx(math.sqrt(2 / 256), rel=0.1)


def test_gradients_that_are_handed_on_alike_are_told_by_their_sketches() -> None:
    x, y = np.random.default_rng(5).standard_normal((2, *SHAPE))
    item = cast(Item, SimpleNamespace(entry=SimpleNamespace(local_shape=SHAPE, sketch=object())))

    def of(array: np.ndarray) -> Item:
        return cast(Item, SimpleNamespace(entry=item.entry, read=lambda: as_array(_estimate(array))))

    assert agree(of(x), of(x * (1 + 1e-9)))
    assert not agree(of(x), of(y))


def test_a_factor_is_seen_far_below_the_bar_of_the_error() -> None:
    x = np.random.default_rng(3).standard_normal(SHAPE)
    found = measure_estimates(_estimate(x), _estimate(1.001 * x))
    assert found.projection == pytest.approx(1.001, abs=1e-9)
    assert found.rel_l2_least is not None
    assert 0.0008 < found.rel_l2_least < 0.001
