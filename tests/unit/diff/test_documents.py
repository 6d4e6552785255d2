"""Where documents begin in packed rows."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.documents import find_documents

TOKENS = np.array([[5, 6, 7, 8, 9, 0]])


def pieces(start: int = 0, stop: int = 6, **inputs: list[object]) -> list[tuple[int, int]] | None:
    found = find_documents({name: np.array(value) for name, value in inputs.items()}, TOKENS)
    return found.divide(0, start, stop) if found else None


def test_positions_that_begin_again_begin_a_document() -> None:
    assert pieces(positions=[[0, 1, 0, 1, 2, 0]]) == [(0, 2), (2, 5), (5, 6)]
    assert pieces(stop=5, positions=[[0, 1, 0, 1, 2, 0]]) == [(0, 2), (2, 5)]


def test_cumulative_lengths_of_one_row_end_documents() -> None:
    assert pieces(lengths=[0, 2, 5]) == [(0, 2), (2, 5), (5, 6)]
    assert pieces(stop=5, lengths=[0, 2, 5]) == [(0, 2), (2, 5)]
    assert pieces(lengths=[0, 6]) == [(0, 6)]


def test_positions_of_one_document_leave_the_row_whole() -> None:
    assert pieces(positions=[[0, 1, 2, 3, 4, 5]]) == [(0, 6)]


@pytest.mark.parametrize(
    "value",
    [
        [[1, 1, 1, 1, 1, 1]],
        [[0, 0, 0, 0, 0, 0]],
        [[0, 1, 3, 4, 5, 6]],
        [[1, 2, 0, 1, 2, 3]],
        [0, 2, 2],
        [1, 6],
        [0, 7],
        [3],
    ],
)
def test_masks_types_and_other_numbers_say_nothing(value: list[object]) -> None:
    assert pieces(other=value) is None
