"""Figures, sizes, counts and ranks as people read them."""

from __future__ import annotations

import math

import pytest

from tensortrace.cli.render.numbers import counted, exactly, number, ranks, size, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "?"), (0.0, "0"), (-0.0, "0"), (3.0, "3"), (0.25, "0.25"), (1 / 3, "0.3333"), (1e-6, "1e-6"),
        (1.25e-7, "1.25e-7"), (353560.0, "3.536e5"), (-2e-12, "-2e-12"), (math.inf, "inf"), (math.nan, "nan"),
        (19914.5, "1.991e4"), (1e5, "1e5"), (1e300, "1e300"),
    ],
)  # fmt: skip
def test_a_figure_has_four_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_an_exact_figure_reads_back_as_the_same_number() -> None:
    assert exactly(0.1 + 0.2) == "0.30000000000000004"
    assert exactly(4096.0) == "4096"
    assert exactly(math.inf) == "inf"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1048576.0 TiB")],
)
def test_a_size_has_a_binary_unit(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_a_count_agrees_with_its_noun() -> None:
    assert counted(1, "boundary") == "1 boundary"
    assert counted(1204, "boundary") == "1,204 boundaries"
    assert counted(0, "microbatch") == "0 microbatches"
    assert counted(2, "rank") == "2 ranks"


def test_ranks_in_a_row_are_drawn_together() -> None:
    assert ranks((3, 0, 1, 2, 7)) == "ranks 0-3, 7"
    assert ranks([5]) == "rank 5"
    assert ranks([]) == "no rank"


def test_a_ratio_has_its_thousands_set_apart_below_a_million() -> None:
    told = [times(value) for value in (None, 0.4867, 999.96, 29_123.0, 133_449.0, 999_900.0, 2.5e6, math.inf)]
    assert told == ["?", "0.4867", "1000", "29,120", "133,400", "999,900", "2.5e6", "inf"]
