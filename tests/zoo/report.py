"""The report of the zoo as a table, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from tests.zoo.judging import Row


def table(rows: Sequence[Row]) -> str:
    """Return the rows as two tables, with a line of totals under each."""
    parts = []
    if bugs := [row for row in rows if row.kind == "bug"]:
        head = (
            "planted mistake",
            "draw",
            "first boundary and cause, expected",
            "found",
            "cause",
            "",
            "left/floor",
        )
        lines = [(r.name, str(r.draw), r.expected, r.found, r.code, r.said, r.residual) for r in bugs]
        right = sum(row.right for row in bugs)
        parts.append(
            _columns(head, lines) + f"\n{right} of {len(bugs)} planted mistakes: place and cause right\n"
        )
    if legal := [row for row in rows if row.kind == "legal"]:
        head = ("legal pair", "draw", "", "compared, equal", "power: median", "worst", "found")
        lines = [
            (
                r.name,
                str(r.draw),
                r.said,
                f"{r.compared} {r.equal}",
                _number(r.median),
                _number(r.worst),
                r.found,
            )
            for r in legal
        ]
        alarms = sum(row.said == "ALARM" for row in legal)
        others = sum(not row.right for row in legal) - alarms
        parts.append(
            _columns(head, lines) + f"\n{len(legal)} legal pairs: {alarms} alarms, {others} not judged\n"
        )
    if injected := [row for row in rows if row.kind == "injected"]:
        head = ("error of 1 % in", "draw", "boundary", "", "power there", "found")
        lines = [(r.name, str(r.draw), r.expected, r.said, _number(r.worst), r.found) for r in injected]
        found = sum(row.right for row in injected)
        parts.append(
            _columns(head, lines) + f"\n{found} of {len(injected)} injected errors as the power claims\n"
        )
    return "\n".join(parts)


def document(rows: Iterable[Row]) -> str:
    """Return the rows as JSON."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)


def _columns(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[n]) for line in [head, *lines]) for n in range(len(head))]
    shown = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [head, *lines]
    )
    return "\n".join(line.rstrip() for line in shown)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
