"""The worst element of what updates do not explain, found in one pass, against two passes over the whole."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.compare import Sides
from tensortrace.diff.plan.replays import Meter
from tensortrace.diff.tolerance import Unexplained, measure_unexplained

LENGTH = 100
"""Elements of a piece."""


def in_pieces(unexplained: np.ndarray, sizes: np.ndarray, of_block: int) -> Unexplained:
    def piece(number: int, start: int) -> Sides:
        begin = number * of_block + start
        return unexplained[begin : begin + LENGTH], sizes[begin : begin + LENGTH]

    meter = Meter()
    for number in range(len(sizes) // of_block):
        for start in range(0, of_block, LENGTH):
            meter.add((number, start), piece(number, start))
    return meter.result(lambda number: lambda start: piece(number, start))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grows", [1e-6, 1.0, 1e6])
def test_one_pass_finds_what_two_passes_find(seed: int, grows: float) -> None:
    """Sizes over many orders of magnitude, which grow or shrink from block to block."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 4, 3000)) * np.repeat([1.0, grows, grows**2], 1000)
    sizes[rng.random(3000) < 0.1] = 0.0
    unexplained = rng.normal(0, 1e-7, 3000) * np.maximum(sizes, 1e-9)
    found, whole = in_pieces(unexplained, sizes, 1000), measure_unexplained([(unexplained, sizes)])
    assert found.worst == pytest.approx(whole.worst, rel=1e-12)
    assert found.squares == pytest.approx(whole.squares, rel=1e-12)


def test_a_nan_anywhere_is_infinitely_wrong_and_a_size_that_is_not_finite_counts_as_none() -> None:
    sizes, unexplained = np.ones(2000), np.full(2000, 1e-8)
    sizes[700], unexplained[1234] = np.inf, np.nan
    found = in_pieces(unexplained, sizes, 1000)
    assert found.worst == np.inf
    assert found.squares == 1999
