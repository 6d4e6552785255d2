"""Charts of a report: where values lie, ticks, and what is not drawn."""

from __future__ import annotations

import math
import re

from tensortrace.cli.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, Point, chart
from tensortrace.cli.report.history import MOST_STEPS, history, thinned

FLOOR, CEILING = HEIGHT - BOTTOM, TOP


def heights(path: str) -> list[float]:
    return [float(pair.split()[1]) for pair in re.split("[ML]", path) if pair]


def test_a_logarithmic_axis_spaces_decades_evenly_and_lays_zero_on_the_floor() -> None:
    points = [Point(0, 0.0), Point(1, 1e-6), Point(2, 1e-5), Point(3, 1e-4)]
    found = chart("t", [Line("error", "b", points)], log=True)
    assert found is not None
    third = (FLOOR - CEILING) / 3  # from 1e-7, which is the floor, to 1e-4
    expected = [FLOOR, FLOOR - third, FLOOR - 2 * third, CEILING]
    assert all(abs(x - y) <= 0.05 for x, y in zip(heights(found.lines[0].path), expected, strict=True))
    assert [tick.text for tick in found.y_ticks] == ["0", "1e-6", "1e-5", "1e-4"]


def test_points_span_the_plot_from_side_to_side() -> None:
    found = chart("t", [Line("a", "a", [Point(10, 1.0), Point(30, 2.0)])], x_ticks=[(20, "20"), (40, "40")])
    assert found is not None
    assert [dot.x for dot in found.lines[0].dots] == [LEFT + 4, WIDTH - RIGHT - 4]
    assert [(tick.at, tick.text) for tick in found.x_ticks] == [((LEFT + 4 + WIDTH - RIGHT - 4) / 2, "20")]


def test_what_is_infinite_lies_at_the_top_and_what_is_missing_breaks_the_line() -> None:
    points = [Point(0, 1e-3), Point(1, None), Point(2, math.inf), Point(3, math.nan), Point(4, 1e-2)]
    found = chart("t", [Line("error", "b", points)], log=True)
    assert found is not None
    assert found.lines[0].path.count("M") == 3
    assert heights(found.lines[0].path)[1] == CEILING


def test_differences_by_round_off_are_not_magnified() -> None:
    found = chart("t", [Line("a", "a", [Point(0, 0.25), Point(1, 0.2499999)])])
    assert found is not None
    assert len(set(heights(found.lines[0].path))) == 1
    assert len({tick.text for tick in found.y_ticks}) == len(found.y_ticks)


def test_nothing_is_drawn_of_no_numbers() -> None:
    assert chart("t", [Line("a", "a", [Point(0, None)])]) is None
    assert chart("t", [Line("a", "a", [Point(0, 0.0)])], log=True) is None


def test_no_peak_of_many_points_is_lost() -> None:
    points = [Point(n, 50.0 if n == 7_777 else 1.0) for n in range(10_000)]
    found = chart("t", [Line("a", "a", points)])
    assert found is not None
    assert found.lines[0].path.count("L") < 250
    assert min(heights(found.lines[0].path)) < FLOOR - 100
    assert found.lines[0].dots == ()


def test_the_history_tells_what_differs_by_how_much_and_what_never_changes() -> None:
    a = {"loss": {0: 4.0, 1: 3.0}, "schedule lr": {0: 0.1, 1: 0.2}, "schedule eps": {0: 1e-8, 1: 1e-8}}
    b = {"loss": {0: 4.0, 1: 3.75}, "schedule lr": {0: 0.1, 1: 0.2}, "schedule eps": {0: 1e-8, 1: 1e-8}}
    found = history([0, 1], a, b)
    assert [(each.name, each.differs) for each in found.table] == [("loss", True), ("schedule lr", False)]
    assert [drawn.note for drawn in found.charts] == ["apart by 0.2 at most, relative", "the same in both"]
    assert found.constant == (("schedule eps", "1e-8"),)


def test_steps_of_the_other_run_are_found_by_the_offset() -> None:
    found = history([5, 6], {"loss": {5: 1.0, 6: 2.0}}, {"loss": {0: 1.0, 1: 2.0}}, offset=5)
    assert not found.table[0].differs


def test_a_constant_that_differs_between_runs_is_drawn() -> None:
    found = history([0, 1], {"schedule lr": {0: 0.1, 1: 0.1}}, {"schedule lr": {0: 0.4, 1: 0.4}})
    assert found.constant == ()
    assert found.charts[0].note == "apart by 0.75 at most, relative"


def test_of_many_steps_some_are_read_the_ends_among_them() -> None:
    found = thinned(range(10_000))
    assert len(found) == MOST_STEPS
    assert (found[0], found[-1]) == (0, 9_999)


def test_a_place_tells_what_each_line_has_there() -> None:
    lines = [
        Line("a", "a", [Point(0, 1.0, "x"), Point(1, 2.0)]),
        Line("b", "b", [Point(0, None), Point(1, 4.0, "y")]),
    ]
    found = chart("t", lines)
    assert found is not None
    assert [(place.name, place.values) for place in found.places] == [("x", ("1", "-")), ("y", ("2", "4"))]


def test_of_texts_that_would_lie_over_each_other_the_first_stays() -> None:
    line = Line("a", "a", [Point(n, float(n)) for n in range(11)])
    found = chart("t", [line], x_ticks=[(5, "blocks.0"), (6, "blocks.1"), (1, "token")])
    assert found is not None
    assert [tick.text for tick in found.x_ticks] == ["blocks.0", "token"]
