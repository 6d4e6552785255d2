"""What is loaded ahead comes out in the order in which it is asked for, errors included."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from tensortrace.diff.ahead import Ahead
from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.plan.comparison import Comparison
from tests.simulated import Program


class Entry:
    """Stands for a comparison that loads its number, or fails."""

    items_a: tuple[Any, ...] = ()
    items_b: tuple[Any, ...] = ()

    def __init__(self, number: int, *, fails: bool = False) -> None:
        self.number, self.fails = number, fails

    def load(self) -> int:
        if self.fails:
            raise NotComparable(str(self.number))
        return self.number


def test_results_and_errors_come_out_in_order_though_some_are_never_asked_for() -> None:
    entries = [cast(Comparison, Entry(n, fails=n == 3)) for n in range(8)]
    with ThreadPoolExecutor(2) as pool, Ahead(pool, 2, entries) as ahead:
        assert [ahead.take(entries[n]) for n in (0, 1, 2)] == [0, 1, 2]
        with pytest.raises(NotComparable, match="3"):
            ahead.take(entries[3])
        assert [ahead.take(entries[n]) for n in (6, 7)] == [6, 7]


def test_the_outcome_is_the_same_for_any_number_of_jobs(tmp_path: Path) -> None:
    class Wrong(Program):
        def token_weight(self, counts: Any, rank: int, microbatch: int) -> float:
            return 1.5 * super().token_weight(counts, rank, microbatch)

    a = Program(ranks=2).write(tmp_path / "a")
    b = Wrong(ranks=1, order=1).write(tmp_path / "b")
    alone, many = (compare(a, b, options=CompareOptions(jobs=jobs)) for jobs in (1, 4))
    assert alone.verdict == "divergent"
    assert many == alone
