"""Rows that neither tensor parallelism nor fully_shard divides lie where torch really puts them."""

from __future__ import annotations

import pytest

from tests.harness import TRAINING, run, torchrun


@pytest.mark.slow
def test_parts_of_both_axes_lie_where_our_integers_say() -> None:
    done = run(torchrun(4, TRAINING / "strided.py"))
    assert done.exit_code == 0, done.errors
    assert done.output.replace("\n", "") == 4 * "looked at 76", "no part lies elsewhere"
