"""The line of errors along the ladder."""

from __future__ import annotations

import math

import msgspec
import pytest

from tensortrace.cli.render.page import Look
from tensortrace.cli.render.spark import height
from tensortrace.cli.render.text import render
from tensortrace.diff.result import Judged, Judgement, Result, Where
from tests.unit.cli.samples import DIVERGENT, EQUIVALENT, TOKEN_WEIGHT, where

replace = msgspec.structs.replace
FIRST = TOKEN_WEIGHT.where
WIDE = Look(80)


def judged(ratio: float, place: Where) -> Judged:
    return Judged(place, Judgement("error-model", 1.0, ratio, ratio, "as allowed"))


def ladder(*ratios: float, first: int) -> Result:
    """Return a divergent result whose first step has these ratios, the first divergence at this place."""
    places = [
        FIRST if n == first else where("activation" if n < first else "param", f"m{n}", "out")
        for n in range(len(ratios))
    ]
    found = tuple(judged(ratio, place) for ratio, place in zip(ratios, places, strict=True))
    return replace(DIVERGENT, boundaries=found)


def drawn(result: Result, look: Look = WIDE) -> list[str]:
    """Return the lines of the drawing, without their indentation; none where there is none."""
    lines = render(result, look=look).splitlines()
    begin = [n for n, line in enumerate(lines) if "error over what is allowed" in line]
    return [line[2:] for line in lines[begin[0] + 1 : begin[0] + 4]] if begin else []


@pytest.mark.parametrize(
    ("ratio", "level"),
    [(0.0, 0), (0.01, 0), (0.011, 1), (0.11, 2), (1.0, 2), (1.01, 3), (99.0, 4), (101.0, 5), (1e4, 7)],
)
def test_a_height_is_the_logarithm_of_error_over_allowance(ratio: float, level: int) -> None:
    # of the five heights beyond, four share the way to 10^4: each spans a decade
    assert height(ratio, 1e4) == level
    assert height(math.nan, 1e4) == height(math.inf, 1e4) == 7


def test_each_boundary_has_a_cell_and_the_first_divergent_one_is_marked() -> None:
    line, mark, kinds = drawn(ladder(0.0, 0.05, 0.5, 1e4, 2e3, 50.0, first=3))
    assert line == "▁▂▃█▇▅"
    assert mark == "   ^ first divergent boundary"
    assert kinds == "|ac||p"


def test_where_no_error_is_finite_the_line_is_drawn_all_the_same() -> None:
    line, mark, _ = drawn(ladder(math.inf, math.nan, first=0))
    assert line == "██"
    assert mark == "^ first divergent boundary"


def test_boundaries_that_share_a_cell_show_the_worst_of_them() -> None:
    ratios = [0.0] * 780
    ratios[25], ratios[399] = 1e4, 1e4
    line, mark, _ = drawn(ladder(*ratios, first=399))
    assert len(line) == 78  # ten boundaries a cell
    assert [n for n, block in enumerate(line) if block == "█"] == [2, 39]
    assert mark.index("^") == 39


def test_a_mark_at_the_end_has_its_words_before_it() -> None:
    _, mark, _ = drawn(ladder(*[0.0] * 77, 1e4, first=77))
    assert mark == "first divergent boundary ^".rjust(78)


def test_a_stream_without_blocks_gets_ascii() -> None:
    text = render(ladder(0.0, 0.05, 0.5, 1e4, first=3), look=Look(80, unicode=False))
    assert "\n  .:-@\n" in text
    assert ".:- within, =+*# beyond it, @ 10000 times" in text


def test_only_the_step_in_which_the_runs_part_is_drawn() -> None:
    result = ladder(0.0, 1e4, first=1)
    later = judged(3.0, where("param", "w", "model", step=1))
    line, *_ = drawn(replace(result, boundaries=(*result.boundaries, later)))
    assert line == "▁█"


def test_nothing_is_drawn_where_the_first_divergence_is_no_judged_value() -> None:
    others = (judged(0.1, where("param", "v", "model")), judged(0.2, where("param", "w", "model")))
    assert drawn(replace(DIVERGENT, boundaries=others)) == []
    assert drawn(DIVERGENT) == []


def test_a_coloured_line_says_within_and_beyond_by_colour_too() -> None:
    text = render(ladder(0.0, 1e4, first=1), look=Look(80, color=True))
    assert "\x1b[32m▁\x1b[0m\x1b[31m█\x1b[0m" in text


def test_equivalent_runs_name_the_boundary_nearest_to_its_limit() -> None:
    found = (judged(0.2, where("param", "v", "model")), judged(0.3125, where("param", "w", "model", step=3)))
    text = render(replace(EQUIVALENT, boundaries=found))
    assert "\nnearest to its limit: 0.31 of it at step 3, microbatch 0: param w model\n" in text


def test_what_is_equal_or_declared_is_not_near_its_limit() -> None:
    found = (judged(0.0, where("param", "v", "model")), judged(5.0, where("param", "w", "model")))
    assert "nearest" not in render(replace(EQUIVALENT, boundaries=found))
