"""What a diff says that it would have found, it finds: errors of 1.1 times the stated power, anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.power import candidates, plant
from tensortrace.diff.engine import compare
from tests.integration.judged import judge_in
from tests.simulated import Program

DRAWN = 6


@pytest.mark.parametrize("seed", [1, 2])
def test_errors_of_the_stated_power_are_found_at_boundaries_drawn_at_random(
    tmp_path: Path, seed: int
) -> None:
    judge = judge_in(tmp_path)
    a = judge.write(Program(steps=2, rows=12))
    b = judge.write(Program(ranks=2, steps=2, rows=12, order=seed))
    every = candidates(compare(a, b))
    assert len(every) > 30
    planted = [
        (boundary.where, each)
        for boundary in random.Random(seed).sample(every, DRAWN)  # noqa: S311 - no secrets
        for each in plant(a, b, boundary, 0.01)
    ]
    assert len(planted) >= 2 * DRAWN
    assert [miss for miss in planted if not miss[1].found] == []
