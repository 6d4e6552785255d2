"""Loss, norms and schedule of both runs over the steps, as charts and as a table of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tensortrace.cli.render.numbers import number
from tensortrace.cli.render.safe import safe
from tensortrace.cli.report.chart import Chart, Line, Point, chart
from tensortrace.diff.series import Series

MOST_CHARTS = 12
MOST_STEPS = 400
"""Steps that are read; of more, evenly spread ones."""

_CLOSE = 1e-9


class Numbers(NamedTuple):
    """A number over the steps of both runs; None where a run has none."""

    name: str
    a: tuple[float | None, ...]
    b: tuple[float | None, ...]
    differs: bool


class History(NamedTuple):
    """Charts of what moves or differs, and all numbers; ``constant`` are those that do neither."""

    steps: tuple[int, ...]
    charts: tuple[Chart, ...]
    table: tuple[Numbers, ...]
    constant: tuple[tuple[str, str], ...]
    left_out: int


def thinned(steps: Sequence[int]) -> list[int]:
    """Return at most ``MOST_STEPS`` steps, the first and the last among them."""
    if len(steps) <= MOST_STEPS:
        return list(steps)
    places = {round(n * (len(steps) - 1) / (MOST_STEPS - 1)) for n in range(MOST_STEPS)}
    return [steps[place] for place in sorted(places)]


def history(steps: Sequence[int], a: Series, b: Series | None, offset: int = 0) -> History:
    """Return the history over ``steps``, which are a's; b's are ``offset`` less."""
    found: list[Numbers] = []
    constant: list[tuple[str, str]] = []
    for name in dict.fromkeys([*a, *(b or {})]):
        left = tuple(a.get(name, {}).get(step) for step in steps)
        right = tuple((b or {}).get(name, {}).get(step - offset) for step in steps)
        differs = b is not None and any(_differ(x, y) for x, y in zip(left, right, strict=True))
        known = {value for value in (*left, *right) if value is not None}
        if len(known) == 1 and not differs:
            constant.append((safe(name), number(known.pop())))
        elif known:
            found.append(Numbers(safe(name), left, right, differs))
    charts = [drawn for each in found if (drawn := _chart(each, steps, both=b is not None)) is not None]
    kept = tuple(charts[:MOST_CHARTS])
    return History(tuple(steps), kept, tuple(found), tuple(constant), len(charts) - len(kept))


def _differ(x: float | None, y: float | None) -> bool:
    if x is None or y is None:
        return x is not y
    return not math.isclose(x, y, rel_tol=_CLOSE)


def _note(numbers: Numbers) -> str:
    """Say how far the runs are apart."""
    if not numbers.differs:
        return "the same in both"
    pairs = [(x, y) for x, y in zip(numbers.a, numbers.b, strict=True) if x is not None and y is not None]
    apart = [abs(y - x) / max(abs(x), abs(y)) for x, y in pairs if x != y]
    if len(pairs) < len(numbers.a) and not apart:
        return "not in all steps of both"
    return f"apart by {number(float(f'{max(apart):.2g}'))} at most, relative" if apart else ""


def _chart(numbers: Numbers, steps: Sequence[int], *, both: bool) -> Chart | None:
    def points(values: Sequence[float | None]) -> list[Point]:
        return [Point(s, v, f"step {s}") for s, v in zip(steps, values, strict=True)]

    lines = [Line("a", "a", points(numbers.a))]
    if both:
        lines.append(Line("b", "b", points(numbers.b)))
    ends = {steps[0], steps[-1], steps[len(steps) // 2]}
    note = _note(numbers) if both else ""
    title = numbers.name.removeprefix("schedule ")
    return chart(title, lines, note=note, x_ticks=[(s, str(s)) for s in sorted(ends)], x_title="step")
