"""The errors of one step along the ladder as one line: how far each is from what was allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from tensortrace.cli.render import words
from tensortrace.cli.render.numbers import number
from tensortrace.cli.render.page import Page
from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import Judged, Result

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", ".:-=+*#@"
"""Heights, from least to greatest; the second where the stream holds no blocks."""

WITHIN = 3
"""Heights that are within what was allowed: up to a hundredth of it, a tenth, all; the others are beyond."""

LEAST_TOP = 100.0
"""What the greatest height stands for at least: what is just beyond its limit is not drawn as the worst."""

Cells = list[list[Judged]]


def along(page: Page, result: Result) -> None:
    """Draw the step in which the runs part, boundaries in causal order, and mark the first divergent one.

    Boundaries that share a cell show the greatest error of theirs. Nothing is drawn where the first
    divergence is no value that was judged, such as a boundary that one run lacks.
    """
    first = result.first_divergent
    found = [each for each in result.boundaries if first and each.where.step == first.where.step]
    if not first or len(found) < 2 or all(each.where != first.where for each in found):
        return
    ramp = BLOCKS if page.look.unicode else PLAIN
    cells = cells_of(found, page.look.width - 2)
    top = top_of(found)
    heights = [max(height(each.judgement.ratio, top) for each in cell) for cell in cells]
    page.blank()
    within, beyond, times = ramp[:WITHIN], ramp[WITHIN:-1], number(float(f"{top:.1e}"))
    scale = f"{within} within, {beyond} beyond it, {ramp[-1]} {times} times"
    page.line((f"{words.step(first.where.step)}, error over what is allowed:", "bold"), f" {scale}")
    runs = groupby(heights, key=lambda level: "red" if level >= WITHIN else "green")
    page.line(*(("".join(ramp[level] for level in part), color) for color, part in runs), indent=2)
    at = next(n for n, cell in enumerate(cells) if any(each.where == first.where for each in cell))
    page.line(_mark(at, "first divergent boundary", page.look.width - 2), indent=2)
    page.line((_rungs(cells), "dim"), indent=2)


def nearest_to_limit(page: Page, result: Result) -> None:
    """Say which boundary within its limit came nearest to it; nothing where none has an error."""
    found = [each for each in result.boundaries if 0 < each.judgement.ratio <= 1]
    if found and result.first_divergent is None:
        worst = max(found, key=lambda each: each.judgement.ratio)
        place = f"{words.moment(worst.where)}: {words.key(worst.where)}"
        text = f" {number(float(f'{worst.judgement.ratio:.2g}'))} of it at {place}"
        page.line(("nearest to its limit:", "bold"), text)


def cells_of(found: Sequence[Judged], width: int) -> Cells:
    """Return the boundaries in at most ``width`` cells of about as many each, in order."""
    count = min(width, len(found))
    bounds = [len(found) * n // count for n in range(count + 1)]
    return [list(found[a:b]) for a, b in pairwise(bounds)]


def top_of(found: Sequence[Judged]) -> float:
    """Return the ratio that the greatest height stands for: the greatest that is finite."""
    ratios = (each.judgement.ratio for each in found)
    return max([LEAST_TOP, *(ratio for ratio in ratios if math.isfinite(ratio))])


def height(ratio: float, top: float) -> int:
    """Return the height of an error over what was allowed, on a logarithmic scale; of NaN the greatest."""
    if ratio <= 1:
        return sum(ratio > limit for limit in (0.01, 0.1))
    if not ratio < top:
        return len(BLOCKS) - 1
    return WITHIN + int((len(BLOCKS) - 1 - WITHIN) * math.log(ratio) / math.log(top))


def _mark(at: int, text: str, width: int) -> str:
    """Return a pointer to a cell with a text on the side where there is room."""
    if at + 2 + len(text) <= width:
        return " " * at + f"^ {text}"
    return " " * max(at - len(text) - 1, 0) + f"{text} ^"[-at - 1 :]


def _rungs(cells: Cells) -> str:
    """Return the kinds below the cells in which each begins, as much of their names as there is room for."""
    text = ""
    for kind, part in groupby(cells, key=lambda cell: cell[0].where.kind):
        room = len(list(part)) - 1
        text += f"|{safe(kind, limit=20)[:room]:{room}}" if room else "|"
    return text
