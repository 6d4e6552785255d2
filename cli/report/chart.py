"""Line charts as numbers that an SVG can be drawn from: no script, nothing to load, lines keep in print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tensortrace.cli.render.numbers import number
from tensortrace.diff.result import Where

WIDTH, HEIGHT = 400, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 10, 24

LETTER = 5.5
"""Width of a letter of a tick's text, about."""

MOST_POINTS = 240
"""Points of a line; of more the greatest of each stretch stays, so that no peak is lost."""

MOST_DOTS = 60
"""Points of a line up to which each is marked."""


_FLAT = 2e-3
"""Part of a value by which an axis goes beyond it at least: round-off is drawn as no difference."""


class Point(NamedTuple):
    """A value to draw: what its place is called, and the boundary that it is of, if it is of one."""

    x: float
    y: float | None
    name: str = ""
    where: Where | None = None


class Line(NamedTuple):
    """Values to draw; ``style`` is a class of the style sheet.

    None breaks the line; where the axis is logarithmic, 0 lies on the floor of the chart.
    """

    label: str
    style: str
    points: Sequence[Point]


class Dot(NamedTuple):
    """A marked point."""

    x: float
    y: float


class Place(NamedTuple):
    """What can be pointed at: a place on the x axis, its name, each line's value, the boundary there."""

    at: float
    name: str
    values: tuple[str, ...]
    where: Where | None


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
    places: tuple[Place, ...]
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
    xs = [point.x for line in lines for point in line.points if point.y is not None]
    ys = [p.y for line in lines for p in line.points if p.y is not None and math.isfinite(p.y)]
    positive = [y for y in ys if y > 0]
    if not ys or (log and not positive):
        return None
    floor = log and min(ys) <= 0
    vertical = _log_axis(positive, floor=floor) if log else _linear_axis(ys)
    span = (min(xs), max(xs))
    across = _Axis(span[0] - 0.5 * (span[0] == span[1]), span[1] + 0.5 * (span[0] == span[1]),
                   LEFT + 4, WIDTH - RIGHT - 4, log=False)  # fmt: skip
    drawn = tuple(_draw(line, across, vertical) for line in lines)
    named = _apart(Tick(across.at(x), text) for x, text in x_ticks if span[0] <= x <= span[1])
    return Chart(
        title, note, drawn, tuple(_places(lines, across)), named, _ticks(vertical, floor=floor), x_title,
        f"{title}: {', '.join(line.label for line in lines)}",
    )  # fmt: skip


def _apart(ticks: Iterable[Tick]) -> tuple[Tick, ...]:
    """Return the ticks whose texts fit beside those before them and into the box."""
    kept: list[tuple[float, float, Tick]] = []
    for tick in ticks:
        half = LETTER * len(tick.text) / 2
        low, high = tick.at - half, tick.at + half
        if high < WIDTH and all(high + LETTER < begin or end + LETTER < low for begin, end, _ in kept):
            kept.append((low, high, tick))
    return tuple(tick for _, _, tick in kept)


def _draw(line: Line, across: _Axis, vertical: _Axis) -> Drawn:
    pieces: list[str] = []
    dots: list[Dot] = []
    pen = "M"
    for point in line.points:
        if point.y is None or math.isnan(point.y):
            pen = "M"
            continue
        dot = Dot(across.at(point.x), _height(point.y, vertical))
        pieces.append(f"{pen}{dot.x:g} {dot.y:g}")
        pen = "L"
        dots.append(dot)
    return Drawn(line.label, line.style, "".join(pieces), tuple(dots) if len(dots) <= MOST_DOTS else ())


def _places(lines: Sequence[Line], across: _Axis) -> Iterator[Place]:
    """Yield what the lines say place by place; all lines have a point for each place, some without value."""
    for points in zip(*(line.points for line in lines), strict=True):
        known = next((point for point in points if point.name), points[0])
        values = tuple("-" if point.y is None else number(point.y) for point in points)
        yield Place(across.at(known.x), known.name, values, known.where)


def _height(value: float, axis: _Axis) -> float:
    if axis.log and value <= 0:
        return axis.begin
    return axis.end if math.isinf(value) else axis.at(value)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most ``MOST_POINTS`` points, of each stretch the greatest."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = -(-len(points) // MOST_POINTS)
    stretches = (points[start : start + size] for start in range(0, len(points), size))
    return [max(stretch, key=lambda p: -math.inf if p.y is None else p.y) for stretch in stretches]


def _log_axis(values: Iterable[float], *, floor: bool) -> _Axis:
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return _Axis(low - floor, max(high, low + 1), HEIGHT - BOTTOM, TOP, log=True)


def _linear_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    margin = max(0.05 * (high - low), _FLAT * max(abs(low), abs(high))) or 1.0
    return _Axis(low - margin, high + margin, HEIGHT - BOTTOM, TOP, log=False)


def _ticks(axis: _Axis, *, floor: bool) -> tuple[Tick, ...]:
    """Return marks of the y axis; on the ``floor`` of a logarithmic one lies what is 0."""
    if axis.log:
        span = int(axis.high - axis.low)
        exponents = range(int(axis.high), math.ceil(axis.low) + floor - 1, -max(1, -(-span // 5)))
        zero = (Tick(axis.begin, "0"),) if floor else ()
        return zero + tuple(Tick(axis.at(10.0**e), f"1e{e}") for e in reversed(exponents))
    step = _round_step((axis.high - axis.low) / 5)
    first = math.ceil(axis.low / step)
    values = [n * step for n in range(first, math.floor(axis.high / step) + 1)]
    return tuple(Tick(axis.at(value), number(float(f"{value:.6g}"))) for value in values)


def _round_step(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not less than ``size``."""
    power = 10.0 ** math.floor(math.log10(size))
    return float(next(times * power for times in (1, 2, 5, 10) if times * power >= size * (1 - 1e-9)))
