"""Rows that go to experts are matched by what they hold."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.dispatch import match_rows

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(700, 6)).astype(np.float32)


def test_rows_in_another_order_and_with_round_off_are_found() -> None:
    order = RNG.permutation(len(ROWS))
    noisy = ROWS[order] * (1 + 1e-6 * RNG.normal(size=ROWS.shape)).astype(np.float32)
    found = match_rows(ROWS, noisy)
    assert (found.only_a, found.only_b) == (0, 0)
    assert np.array_equal(order[found.rows_b], found.rows_a)


def test_rows_of_one_run_alone_are_counted_and_left_out() -> None:
    extra = RNG.normal(size=(5, 6)).astype(np.float32)
    found = match_rows(ROWS, np.concatenate([extra, ROWS[10:]]))
    assert (found.only_a, found.only_b) == (10, 5)
    assert np.array_equal(found.rows_a, np.arange(10, len(ROWS)))
    assert np.array_equal(found.rows_b, np.arange(5, len(ROWS) - 5))


def test_equal_rows_match_as_often_as_both_have_them() -> None:
    found = match_rows(np.ones((3, 2)), np.ones((2, 2)))
    assert (len(found.rows_a), found.only_a, found.only_b) == (2, 1, 0)


def test_tokens_that_went_to_two_experts_match_in_order_though_round_off_parts_the_runs() -> None:
    chosen = np.repeat(np.arange(40), 2)
    sent = ROWS[chosen[np.argsort(np.tile([0, 1], 40), kind="stable")]]  # sorted by expert
    found = match_rows(sent, sent * np.float32(1 + 2**-22))
    assert (found.only_a, found.only_b) == (0, 0)
    assert np.array_equal(found.rows_a, found.rows_b)


def test_rows_that_differ_by_more_than_round_off_are_not_the_same() -> None:
    found = match_rows(ROWS[:4], ROWS[:4] * np.float32(1.01))
    assert (len(found.rows_a), found.only_a, found.only_b) == (0, 4, 4)


def test_an_expert_that_was_given_nothing_has_rows_of_the_other_run_only() -> None:
    found = match_rows(np.zeros((0, 3)), np.ones((2, 3)))
    assert (found.rows_a.size, found.rows_b.size, found.only_a, found.only_b) == (0, 0, 0, 2)


def test_rows_of_other_widths_never_match() -> None:
    found = match_rows(ROWS[:3], ROWS[:2, :4])
    assert (len(found.rows_a), found.only_a, found.only_b) == (0, 3, 2)


def test_tokens_with_equal_hidden_states_are_told_apart_by_their_gradients() -> None:
    """Rows 0 and 2 begin alike; b has them in the other order, and its gradients are twice as large."""
    hidden = np.array([[1.0, 2.0], [3.0, 1.0], [1.0, 2.0], [0.0, 5.0]])
    gradient = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.25, -1.0]])
    order = np.array([2, 3, 0, 1])
    found = match_rows(hidden, hidden[order], (gradient, 2 * gradient[order]))
    assert np.array_equal(order[found.rows_b], found.rows_a)
    assert np.array_equal(match_rows(hidden, hidden[order]).rows_b, [0, 3, 2, 1])


def test_equal_hidden_states_of_other_round_off_all_meet() -> None:
    """Where a product is taken of other shapes, equal rows of one run differ in the last bits."""
    noise = 1 + 2**-22 * RNG.integers(-1, 2, size=(2, 12, 6))
    tokens = np.repeat(ROWS[:3], 4, axis=0)
    gradient = RNG.normal(size=(12, 6))
    order = RNG.permutation(12)
    found = match_rows(tokens * noise[0], (tokens * noise[1])[order], (gradient, gradient[order]))
    assert (found.only_a, found.only_b) == (0, 0)
    assert np.array_equal(order[found.rows_b], found.rows_a)


def test_a_gradient_that_no_token_of_the_other_run_has_is_left_over_against_another() -> None:
    hidden, gradient = np.ones((3, 2)), np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    wrong = gradient[[2, 0, 1]] * np.array([[1.0], [1.0], [-1.0]])
    found = match_rows(hidden, hidden, (gradient, wrong))
    assert np.array_equal(found.rows_b, [1, 2, 0])


def test_a_common_factor_is_known_though_every_token_went_to_two_experts() -> None:
    """All rows are there twice; halved, the gradient 2 of one is the 1 of the other."""
    hidden = np.repeat(np.eye(3), 2, axis=0)
    gradient = np.array([[1.0], [2.0], [-3.0], [-1.5], [4.0], [2.0]])
    order = np.array([1, 0, 3, 2, 5, 4])
    found = match_rows(hidden, hidden, (gradient, 0.5 * gradient[order]))
    assert np.array_equal(found.rows_b, order)
