"""``trace diff``: compare two traces and name the first boundary where they part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from tensortrace.cli.comparing import TRACE, comparison_options
from tensortrace.cli.machine import cores
from tensortrace.cli.render.document import STDOUT, refuse_existing, write_document
from tensortrace.cli.render.page import look_of
from tensortrace.cli.render.progress import Progress
from tensortrace.cli.render.say import say
from tensortrace.cli.render.text import Detail, hints, render
from tensortrace.diff.result import Result
from tensortrace.tracer.selection import parse_kinds

if TYPE_CHECKING:
    from tensortrace.diff.resume import ResumeResult


@click.command("diff")
@click.argument("a", type=TRACE)
@click.argument("b", type=TRACE)
@click.argument("resumed", type=TRACE, required=False, metavar="")
@click.option(
    "--resume", is_flag=True,
    help="Compare FULL FIRST RESUMED: a run, one that was saved, and one that went on from there.",
)  # fmt: skip
@comparison_options
@click.option("--verify", is_flag=True, help="Read and check every byte of the traces first.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads; by default all cores it may use.")
@click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; - for stdout, alone.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("-q", "detail", flag_value="quiet", type=str, help="Print the headline alone.")
@click.option("-v", "detail", flag_value="verbose", type=str, help="Leave nothing out.")
def command(
    a: Path, b: Path, resumed: Path | None, *, resume: bool, floor: tuple[Path, ...], exact: bool,
    kinds: str, include: tuple[str, ...],
    exclude: tuple[str, ...], allow_missing: tuple[str, ...], align: str | None, expect: tuple[str, ...],
    layout_a: Path | None, layout_b: Path | None, verify: bool, jobs: int | None,
    json_path: str | None, force: bool, detail: Detail | None,
) -> int:  # fmt: skip
    """Compare trace B with the reference A and name the first boundary where they part.

    With --resume compare FULL with FIRST, which was saved, and with RESUMED, which went on from there.

    Exit codes: 0 equivalent, 1 divergent or incomplete, 2 trouble.
    """
    from tensortrace.diff import engine  # the comparison needs what --help does not

    if resume != (resumed is not None):
        raise click.UsageError(
            "--resume takes three traces: FULL FIRST RESUMED"
            if resume
            else f"unexpected third trace {resumed}: three are for --resume"
        )
    if exact and floor:
        raise click.UsageError("--exact and --floor are two policies: give one of them")
    refuse_existing(json_path, force=force)
    options = engine.CompareOptions(
        policy="exact" if exact else "error-model", floor=floor, allow_missing=allow_missing,
        kinds=parse_kinds(kinds) if kinds else (), include=include, exclude=exclude, align=align,
        verify=verify, layout_a=layout_a, layout_b=layout_b, expect=expect, jobs=jobs or cores(),
    )  # fmt: skip
    with Progress(sys.stderr) as progress:
        tell = progress.tell if progress.shown else None
        if resumed is not None:
            from tensortrace.cli.render import resumed as page
            from tensortrace.diff.resume import compare_resumed

            whole = compare_resumed(a, b, resumed, options=options, progress=tell)
            _deliver(whole, page.render, page.hints, json_path, detail or "normal")
            return 0 if whole else 1
        result = engine.compare(a, b, options=options, progress=tell)
    _deliver(result, render, hints, json_path, detail or "normal")
    return 0 if result else 1


R = TypeVar("R", Result, "ResumeResult")


def _deliver(
    result: R, render: Callable[..., str], hints: Callable[[R], Iterable[str]], json_path: str | None,
    detail: Detail,
) -> None:  # fmt: skip
    """Print the result on stdout and hints on stderr; a JSON document on stdout stands alone there."""
    if json_path is not None:
        write_document(result, json_path)
    if json_path != STDOUT:
        look = look_of(sys.stdout)
        say(render(result, look=look, detail=detail), nl=False, color=look.color)
    if detail != "quiet":
        for hint in hints(result):
            say(hint, err=True)
