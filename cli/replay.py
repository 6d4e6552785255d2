"""``trace replay``: hold every boundary of one trace against what its own inputs give."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from tensortrace.cli.machine import cores
from tensortrace.cli.render.document import STDOUT, refuse_existing, write_document, write_text
from tensortrace.cli.render.page import look_of
from tensortrace.cli.render.progress import Progress
from tensortrace.cli.render.replayed import hints, render
from tensortrace.cli.render.say import say
from tensortrace.cli.render.text import Detail

if TYPE_CHECKING:
    from tensortrace.replay.objective import Name

TRACE = click.Path(path_type=Path)


@click.command("replay")
@click.argument("trace", type=TRACE)
@click.option(
    "--objective", type=click.Choice(["mean", "sum", "sequence-mean"]),
    help="What the loss should be: a mean over the step's valid tokens, their sum, or a mean over sequences "
    "of each one's mean. Without it what tokens weigh tells.",
)  # fmt: skip
@click.option("--layout", type=TRACE, metavar="FILE", help="Layout file of the trace (docs/layouts.md).")
@click.option("--no-modules", is_flag=True, help="Do not execute modules again, which is most of the work.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Of stdout.")
@click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON, too.")
@click.option(
    "--pytest", "test", type=TRACE, metavar="FILE", help="Write a test that replays the packed case."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("-q", "detail", flag_value="quiet", type=str, help="Print the headline alone.")
@click.option("-v", "detail", flag_value="verbose", type=str, help="Leave nothing out.")
def command(
    trace: Path, *, objective: str | None, layout: Path | None, no_modules: bool,
    form: Literal["text", "json"], json_path: str | None, test: Path | None, force: bool,
    detail: Detail | None,
) -> int:  # fmt: skip
    """Hold every boundary of TRACE against what its recorded inputs give in float64: no second run is needed.

    Or, where TRACE is a file that `trace pack` made, replay the case in it.

    Exit codes: 0 agrees, 1 a mismatch, or the trace is not whole, 2 trouble. Of a packed case: 0 its verdict
    is the one that it states, 1 another, 2 trouble.
    """
    from tensortrace.replay.engine import ReplayOptions, replay  # what --help does not need

    if form == "json" and json_path is not None:
        raise click.UsageError("--format json writes to stdout, --json to a file: give one of them")
    json_path = STDOUT if form == "json" else json_path
    refuse_existing(json_path, force=force)
    refuse_existing(None if test is None else str(test), force=force)
    if trace.is_file():
        if objective or layout:
            raise click.UsageError("a packed case has its own objective and layout")
        return _packed(trace, json_path, detail or "normal", test)
    if test is not None:
        raise click.UsageError("--pytest is for a packed case: see `trace pack`")
    options = ReplayOptions(cast("Name | None", objective), layout, "none" if no_modules else "all")
    with Progress(sys.stderr) as progress:
        result = replay(trace, options=options, progress=progress.tell if progress.shown else None)
    if json_path is not None:
        write_document(result, json_path)
    if json_path != STDOUT:
        look = look_of(sys.stdout)
        say(render(result, look=look, detail=detail or "normal"), nl=False, color=look.color)
    for hint in () if detail == "quiet" else hints(result):
        say(hint, err=True)
    return 0 if result else 1


def _packed(path: Path, json_path: str | None, detail: Detail, test: Path | None) -> int:
    """Replay a packed case, and write a test of it where asked to."""
    from tensortrace.cli.render import case  # what the replay of a trace does not need
    from tensortrace.replay.packed import replay_case
    from tensortrace.replay.pytest_file import pytest_file

    with Progress(sys.stderr) as progress:
        found = replay_case(path, progress=progress.tell if progress.shown else None, jobs=cores())
    if test is not None:
        write_text(pytest_file(found.case, path, test), str(test))
    if json_path is not None:
        write_document(found, json_path)
    if json_path != STDOUT:
        look = look_of(sys.stdout)
        say(case.render(found, look=look, detail=detail), nl=False, color=look.color)
    for hint in () if detail == "quiet" else case.hints(str(path)):
        say(hint, err=True)
    return 0 if found else 1
