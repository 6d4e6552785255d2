"""Elements without effect, and shifts by them."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.silent import both_silent, silent_elements, without_shift, without_silent

EPS = 2.0**-23


def _gradient(silent: slice, of: int = 48) -> np.ndarray:
    gradient = np.random.default_rng(3).normal(size=of)
    gradient[silent] *= 1e-7
    return gradient


def _of(gradient: np.ndarray) -> list[int]:
    found = silent_elements(gradient, gradient, float(np.linalg.norm(gradient)), EPS)
    return [] if found is None else [int(n) for n in np.flatnonzero(found.elements)]


def test_a_third_of_a_bias_whose_gradient_is_round_off_is_silent() -> None:
    assert _of(_gradient(slice(16, 32))) == list(range(16, 32))


def test_few_small_elements_are_not_silent() -> None:
    assert _of(_gradient(slice(16, 23))) == []


def test_a_bias_that_is_round_off_of_its_terms_is_silent_as_a_whole() -> None:
    gradient = np.random.default_rng(3).normal(size=4) * 1e-7
    found = silent_elements(gradient, gradient, 1.0, EPS)
    assert found is not None
    assert found.elements.all()


def test_what_had_an_effect_in_one_run_or_one_step_is_not_silent() -> None:
    silent, loud = _gradient(slice(16, 32)), _gradient(slice(0, 0))
    assert silent_elements(silent, loud, 7.0, EPS) is None
    before, now = (silent_elements(g, g, 7.0, EPS) for g in (silent, loud))
    assert both_silent(before, now) is None


def test_silent_elements_are_made_equal_and_others_left() -> None:
    a = np.zeros(48)
    b = a + 1e-3
    aside = silent_elements(g := _gradient(slice(16, 32)), g, 7.0, EPS)
    left = without_silent(Assembled(a, b), aside)
    assert left is not None
    assert np.array_equal(left.b, np.where((np.arange(48) >= 16) & (np.arange(48) < 32), a, b))


def test_what_all_keys_are_shifted_by_is_taken_away() -> None:
    random = np.random.default_rng(5)
    keys, bias = random.normal(size=(2, 3, 7, 4)), random.normal(size=(1, 3, 1, 4))
    left = without_shift(Assembled(keys, keys + bias))
    assert left is not None
    np.testing.assert_allclose(left.b, keys, atol=1e-15)


def test_scores_that_are_masked_are_not_part_of_a_shift() -> None:
    random = np.random.default_rng(5)
    scores = np.where(np.tri(6) > 0, random.normal(size=(2, 6, 6)), -np.inf)
    left = without_shift(Assembled(scores, scores + random.normal(size=(2, 6, 1))))
    assert left is not None
    np.testing.assert_allclose(left.b, scores, atol=1e-15)


def test_a_factor_is_no_shift() -> None:
    keys = np.random.default_rng(5).normal(size=(4, 9, 8))
    left = without_shift(Assembled(keys, keys * 1.01))
    assert left is not None
    assert np.linalg.norm(left.b - keys) > 0.008 * np.linalg.norm(keys)
