"""What the ladder of one trace says of a tensor."""

from __future__ import annotations

import pytest

from tensortrace.cli.report.norms import BROKEN, KNOWN, UNKNOWN, _cell, _of_items
from tensortrace.tracer.types import Stats


@pytest.mark.parametrize(
    ("stats", "state"),
    [
        ([Stats(finite=2, nan=0, inf=0, l2=5.0)], KNOWN),
        ([Stats(finite=1, nan=1, inf=0, l2=3.0)], BROKEN),
        ([Stats(finite=0, nan=3, inf=1)], BROKEN),
        ([Stats(finite=0, nan=0, inf=0)], UNKNOWN),
        ([None], UNKNOWN),
    ],
    ids=["finite", "partly NaN", "nothing finite", "empty", "no statistics"],
)
def test_a_tensor_that_is_wholly_nan_is_known_to_be(stats: list[Stats | None], state: int) -> None:
    norm, bad = _of_items(stats)
    assert bad == sum(s.nan + s.inf for s in stats if s is not None)
    assert _cell(norm, bad, 4.0)[0][0] == state
