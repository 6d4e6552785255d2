"""A gradient that a gate lets pass in one run alone is legal where its dtype makes that likely."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.plan.gates import without_flipped

BF16, FP32 = 2.0**-7, 2.0**-23


def _gradients(flips: int) -> Assembled:
    a = np.linspace(0.5, 1.5, 1000)
    b = a.copy()
    b[:flips] = 0.0
    return Assembled(a, b)


def test_few_elements_that_one_run_gates_are_left_out() -> None:
    # 4 × 2⁻⁷ × 1000 = 31 are expected, and 5 × √31 = 28 more may be by chance
    quiet = without_flipped(_gradients(58), eps=BF16)
    assert quiet is not None
    assert np.array_equal(quiet.a, quiet.b)


def test_more_than_chance_are_not() -> None:
    assert without_flipped(_gradients(61), eps=BF16) is None
    assert without_flipped(_gradients(1), eps=FP32) is None  # 0.0005 expected, 0.1 by chance


def test_what_differs_otherwise_is_kept() -> None:
    loaded = _gradients(1)
    loaded.b[5] = 9.0
    quiet = without_flipped(loaded, eps=BF16)
    assert quiet is not None
    assert np.flatnonzero(quiet.a != quiet.b).tolist() == [5]
    assert without_flipped(_gradients(0), eps=BF16) is None
