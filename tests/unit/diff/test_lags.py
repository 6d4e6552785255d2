"""Ranks that work on the same rows must go through the same number of passes."""

from __future__ import annotations

import pytest

from tensortrace.diff.catalog import Part, Slot, StepView
from tensortrace.diff.plan.samples import lags
from tensortrace.tracer.types import Kind

OUT = Slot("train", Kind.ACTIVATION, "m", "out", 0)


def view(cells: dict[int, int], passes: dict[int, int]) -> StepView:
    """Return a step in which each rank, of the cell ``cells[rank]``, recorded some passes."""
    events = {
        (rank, number): (OUT, Part(cells[rank], "train", number))
        for rank, count in passes.items()
        for number in range(count)
    }
    parts = tuple(sorted({part for _, part in events.values()}))
    return StepView(0, {}, parts, dict(events))


@pytest.mark.parametrize(
    ("cells", "passes", "expected"),
    [
        ({0: 0, 1: 0}, {0: 4, 1: 4}, {}),
        ({0: 0, 1: 0}, {0: 4, 1: 8}, {0: (1,)}),
        ({0: 0, 1: 0, 2: 2, 3: 2}, {0: 4, 1: 4, 2: 8, 3: 4}, {2: (2,)}),
        ({0: 0, 1: 1}, {0: 4, 1: 8}, {}),  # ranks of other rows may have more of them
        ({0: 0, 1: 0}, {0: 4, 1: 0}, {}),  # nothing was recorded there
    ],
)
def test_a_rank_whose_window_is_longer_is_told(
    cells: dict[int, int], passes: dict[int, int], expected: dict[int, tuple[int, ...]]
) -> None:
    assert lags(view(cells, passes)) == expected
