"""The summary of a validation: a check for each cell."""

from __future__ import annotations

from tensortrace.cli.formats.compared import NEXT
from tensortrace.cli.formats.summary import Check, Level, Notice, Section, State, Summary, Table
from tensortrace.cli.render import validated as text
from tensortrace.replay.validate.result import CellResult, Validation, Verdict

_STATES: dict[Verdict, State] = {"equivalent": "passed", "trouble": "error"}


def of_validation(result: Validation) -> Summary:
    """Return the summary of ``trace validate``."""
    shown = text.render(result)
    rows = tuple((*row, cell.headline) for row, cell in zip(text.rows(result), result.cells, strict=True))
    sides = tuple(f"{side}: {revision} {commit}" for side, revision, commit in text.sides(result))
    tags = tuple(f"{cell.name}: {', '.join(text.tags(cell.tags))}" for cell in result.cells if cell.tags)
    hints = text.hints(result)
    return Summary(
        tool="trace validate",
        subject=f"{result.feature} against {result.base}",
        verdict=result.verdict,
        holds=bool(result),
        headline=result.headline,
        sections=(
            Section("", table=Table((*text.HEADER, "headline"), rows)),
            Section("", (*sides, *tags, *result.notes)),
        ),
        checks=tuple(_check(cell, shown) for cell in result.cells),
        notices=tuple(_notice(cell) for cell in result.cells),
        commands=tuple(hint.removeprefix(NEXT) for hint in hints if hint.startswith(NEXT)),
        text=shown,
    )


def _check(cell: CellResult, shown: str) -> Check:
    state = _STATES.get(cell.verdict, "failed")
    return Check(cell.name, state) if state == "passed" else Check(cell.name, state, cell.headline, shown)


def _notice(cell: CellResult) -> Notice:
    level: Level = "notice" if cell.verdict == "equivalent" else "error"
    return Notice(level, f"{cell.name}: {cell.verdict}", (cell.headline,))
