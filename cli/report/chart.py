"""Line charts as numbers that an SVG can be drawn from: no script, nothing to load, lines keep in print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensortrace.cli.render.numbers import number

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 10, 24

MOST_POINTS = 240
"""Points of a line; of more the greatest of each stretch stays, so that no peak is lost."""

MOST_DOTS = 60
"""Points of a line up to which each is marked."""


_FLAT = 2e-3
"""Part of a value by which an axis goes beyond it at least: round-off is drawn as no difference."""


class Line(NamedTuple):
    """Values to draw: (x, y, what it is called); ``style`` is a class of the style sheet.

    None breaks the line; where the axis is logarithmic, 0 lies on the floor of the chart.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float | None, str]]


class Dot(NamedTuple):
    """A marked point, and what is said of it."""

    x: float
    y: float
    says: str


class Drawn(NamedTuple):
    """A line as an SVG path, and its marked points."""

    label: str
    style: str
    path: str
    dots: tuple[Dot, ...]


class Tick(NamedTuple):
    """A place on an axis and its text."""

    at: float
    text: str


class Chart(NamedTuple):
    """A chart in a box of WIDTH × HEIGHT; the plot lies inside of the margins."""

    title: str
    note: str
    lines: tuple[Drawn, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str
    describes: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


class _Axis(NamedTuple):
    """Maps values to places; logarithmic where ``log``."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """Return where a value lies."""
        place = math.log10(value) if self.log else value
        share = (place - self.low) / (self.high - self.low)
        return round(self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin), 1)


def chart(
    title: str, lines: Sequence[Line], *, log: bool = False, note: str = "", x_title: str = "",
    x_ticks: Sequence[tuple[float, str]] = (),
) -> Chart | None:  # fmt: skip
    """Return a chart of the lines; None where there is no number to draw."""
    lines = [line._replace(points=_thinned(line.points)) for line in lines]
    xs = [x for line in lines for x, y, _ in line.points if y is not None]
    ys = [y for line in lines for _, y, _ in line.points if y is not None and math.isfinite(y)]
    positive = [y for y in ys if y > 0]
    if not ys or (log and not positive):
        return None
    vertical = _log_axis(positive, floor=min(ys) <= 0) if log else _linear_axis(ys)
    span = (min(xs), max(xs))
    across = _Axis(span[0] - 0.5 * (span[0] == span[1]), span[1] + 0.5 * (span[0] == span[1]),
                   LEFT + 4, WIDTH - RIGHT - 4, log=False)  # fmt: skip
    drawn = tuple(_draw(line, across, vertical) for line in lines)
    named = tuple(Tick(across.at(x), text) for x, text in x_ticks if span[0] <= x <= span[1])
    return Chart(
        title, note, drawn, named, _ticks(vertical), x_title,
        f"{title}: {', '.join(line.label for line in lines)}",
    )  # fmt: skip


def _draw(line: Line, across: _Axis, vertical: _Axis) -> Drawn:
    pieces: list[str] = []
    dots: list[Dot] = []
    pen = "M"
    for x, y, says in line.points:
        if y is None or math.isnan(y):
            pen = "M"
            continue
        place = across.at(x), _height(y, vertical)
        pieces.append(f"{pen}{place[0]:g} {place[1]:g}")
        pen = "L"
        dots.append(Dot(*place, says))
    return Drawn(line.label, line.style, "".join(pieces), tuple(dots) if len(dots) <= MOST_DOTS else ())


def _height(value: float, axis: _Axis) -> float:
    if axis.log and value <= 0:
        return axis.begin
    return axis.end if math.isinf(value) else axis.at(value)


def _thinned(points: Sequence[tuple[float, float | None, str]]) -> list[tuple[float, float | None, str]]:
    """Return at most ``MOST_POINTS`` points, of each stretch the greatest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-len(points) // MOST_POINTS)
    stretches = (points[start : start + size] for start in range(0, len(points), size))
    return [max(stretch, key=lambda p: -math.inf if p[1] is None else p[1]) for stretch in stretches]


def _log_axis(values: Iterable[float], *, floor: bool) -> _Axis:
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return _Axis(low - floor, max(high, low + 1), HEIGHT - BOTTOM, TOP, log=True)


def _linear_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    margin = max(0.05 * (high - low), _FLAT * max(abs(low), abs(high))) or 1.0
    return _Axis(low - margin, high + margin, HEIGHT - BOTTOM, TOP, log=False)


def _ticks(axis: _Axis) -> tuple[Tick, ...]:
    if axis.log:
        span = int(axis.high - axis.low)
        exponents = range(math.ceil(axis.low), int(axis.high) + 1, max(1, -(-span // 5)))
        return tuple(Tick(axis.at(10.0**e), f"1e{e}") for e in exponents)
    step = _round_step((axis.high - axis.low) / 5)
    first = math.ceil(axis.low / step)
    values = [n * step for n in range(first, math.floor(axis.high / step) + 1)]
    return tuple(Tick(axis.at(value), number(float(f"{value:.6g}"))) for value in values)


def _round_step(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not less than ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return float(next(times * power for times in (1, 2, 5, 10) if times * power >= size * (1 - 1e-9)))
