"""Attention masks of two implementations say the same of which positions are kept."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.masks import has_padding, in_one_form

KEPT = np.array([[True, True, True, False], [True, True, False, False], [True, True, True, True]])


@pytest.mark.parametrize("hidden", [-1e9, -np.inf, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("boolean", [KEPT, ~KEPT])
def test_what_is_added_to_scores_is_the_mask_that_keeps_the_same(hidden: float, boolean: np.ndarray) -> None:
    added = np.where(KEPT, 0.0, hidden).astype(np.float32)
    left, right = in_one_form(boolean, added) or (None, None)
    assert left is not None
    assert np.array_equal(left, KEPT)
    assert np.array_equal(right, KEPT)
    assert in_one_form(added, boolean) is not None


def test_a_position_that_one_mask_keeps_and_the_other_hides_remains() -> None:
    other = KEPT.copy()
    other[0, 3] = True
    left, right = in_one_form(KEPT, np.where(other, 0.0, -np.inf)) or (KEPT, KEPT)
    assert np.argwhere(left != right).tolist() == [[0, 3]]


def test_two_ways_to_hide_by_adding_are_one_mask() -> None:
    left, right = in_one_form(np.where(KEPT, 0.0, -1e9), np.where(KEPT, 0.0, -np.inf)) or (KEPT, ~KEPT)
    assert np.array_equal(left, right)


@pytest.mark.parametrize(
    "other", [np.where(KEPT, 0.0, -3.0), np.where(KEPT, 1.0, -1e9), np.zeros(KEPT.shape)]
)
def test_biases_weights_and_what_hides_nothing_are_no_masks(other: np.ndarray) -> None:
    assert in_one_form(KEPT, other) is None


def test_rows_with_padding_are_read_from_either_polarity() -> None:
    padded = [True, True, False]
    assert has_padding(KEPT, 3) == padded
    assert has_padding(~KEPT, 3) == padded
    assert has_padding(np.where(KEPT, 0.0, -np.inf)[:, None, None], 3) == padded
    causal = np.tril(np.ones((4, 4), dtype=bool)) & KEPT[:, None]
    assert has_padding(causal[:, None], 3) == padded


def test_a_causal_mask_hides_no_row_s_end() -> None:
    assert has_padding(np.tril(np.ones((3, 4, 4), dtype=bool)), 3) == []
    assert has_padding(KEPT, 4) == []
