"""The outcome of a validation as text."""

from __future__ import annotations

import shlex

from tensortrace.cli.render.finding import SENTENCE, SHORT
from tensortrace.cli.render.numbers import counted, number
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import Detail
from tensortrace.replay.validate.result import CellResult, Run, Tags, Validation

_STYLES = {
    "equivalent": "bold green", "divergent": "bold red", "incomplete": "bold yellow", "failed": "bold red",
    "trouble": "bold yellow",
}  # fmt: skip


HEADER = ("cell", "verdict", "cause", "compared", "bitwise equal", "noise")


def render(result: Validation, *, look: Look | None = None, detail: Detail = "normal") -> str:
    """Return the result as text; ``quiet`` is the headline alone, ``verbose`` shows every run."""
    page = Page(look or Look())
    headline = safe(result.headline, limit=SENTENCE)
    page.line((result.verdict.upper(), _STYLES[result.verdict]), headline.removeprefix(result.verdict))
    if detail == "quiet":
        return page.text()
    page.blank()
    page.table(HEADER, rows(result), right="compared,bitwise equal,noise")
    for cell in result.cells:
        _cell(page, cell, verbose=detail == "verbose", alone=len(result.cells) == 1)
    page.blank()
    for side, revision, commit in sides(result):
        page.line((f"{side}:", "bold"), f" {safe(revision, limit=SHORT)} {commit[:12]}")
    for note in result.notes:
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}")
    page.line(("kept in:", "bold"), f" {safe(result.folder, limit=SHORT)}")
    return page.text()


def hints(result: Validation) -> tuple[str, ...]:
    """Return the next useful command for the first cell that is not equivalent."""
    for cell in result.cells:
        runs = {run.role: run for run in cell.runs}
        if cell.verdict in ("divergent", "incomplete") and "feature" in runs:
            floors = [f"--floor {shlex.quote(run.trace)}" for run in cell.runs[1:-1]]
            words = [
                "trace diff",
                shlex.quote(cell.runs[0].trace),
                shlex.quote(runs["feature"].trace),
                *floors,
            ]
            return (f"next: {' '.join(words)}",)
        if cell.verdict in ("failed", "trouble") and cell.runs and cell.runs[-1].exit_code:
            return (f"next: less {shlex.quote(cell.runs[-1].log)}",)
    return ()


def sides(result: Validation) -> tuple[tuple[str, str, str], ...]:
    """Return base and feature: name, revision as given, commit."""
    return (
        ("base", result.base, result.base_commit),
        ("feature", result.feature, result.feature_commit),
    )


def rows(result: Validation) -> list[tuple[str, ...]]:
    """Return a row for each cell, under ``HEADER``."""
    return [
        (
            safe(cell.name, limit=SHORT), cell.verdict, safe(cell.cause or "-", limit=SHORT),
            f"{cell.compared:,}" if cell.compared else "-",
            f"{cell.bitwise_equal:,}" if cell.compared else "-",
            "-" if cell.noise is None else "none" if cell.noise == 0 else number(cell.noise),
        )
        for cell in result.cells
    ]  # fmt: skip


def _cell(page: Page, cell: CellResult, *, verbose: bool, alone: bool) -> None:
    page.blank()
    if not alone:
        page.line((safe(cell.name, limit=SHORT), "bold"), f": {safe(cell.headline, limit=SENTENCE)}")
    page.line(safe(shlex.join(cell.command), limit=SENTENCE), indent=2)
    if cell.tags:
        page.line(", ".join(tags(cell.tags)), indent=2)
    for run in cell.runs if verbose else ():
        page.line(_run(run), indent=2)
    for note in cell.notes if verbose else ():
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}", indent=2)


def tags(found: Tags) -> list[str]:
    """Return what identifies a run, in words."""
    parts = [
        found.model or "?", counted(found.world_size, "rank"), *found.meshes, "/".join(found.dtypes) or "?",
        *found.inputs, counted(found.steps, "step"), found.device or "?", found.host or "?",
        *(f"{name} {version}" for name, version in found.versions.items()),
    ]  # fmt: skip
    return [safe(part, limit=SHORT) for part in parts]


def _run(run: Run) -> str:
    how = "found" if run.reused else f"{run.seconds:.0f} s"
    return f"{run.role}: {run.commit[:12]}, exit code {run.exit_code}, {how}: {safe(run.trace, limit=SHORT)}"
