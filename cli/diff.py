"""``trace diff``: compare two traces and name the first boundary where they part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import RESUME_HELP, TRACE, comparison_options, require_resumed
from tensortrace.cli.delivery import Delivery, Form, deliver, delivery_options, requested
from tensortrace.cli.formats.compared import of_comparison, of_resume
from tensortrace.cli.machine import cores
from tensortrace.cli.render.progress import Progress
from tensortrace.cli.render.text import Detail, hints, render
from tensortrace.tracer.selection import parse_kinds

if TYPE_CHECKING:
    from tensortrace.diff.engine import CompareOptions


@click.command("diff", cls=Command)
@click.argument("a", type=TRACE)
@click.argument("b", type=TRACE)
@click.argument("resumed", type=TRACE, required=False, metavar="")
@click.option("--resume", is_flag=True, help=RESUME_HELP)
@comparison_options
@click.option("--verify", is_flag=True, help="Read and check every byte of the traces first.")
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads; by default all cores it may use.")
@delivery_options
def command(
    a: Path, b: Path, resumed: Path | None, *, resume: bool, floor: tuple[Path, ...], exact: bool,
    kinds: str, include: tuple[str, ...],
    exclude: tuple[str, ...], allow_missing: tuple[str, ...], align: str | None, expect: tuple[str, ...],
    layout_a: Path | None, layout_b: Path | None, verify: bool, jobs: int | None,
    form: Form, json_path: str | None, force: bool, detail: Detail | None,
) -> int:  # fmt: skip
    """Compare trace B with the reference A and name the first boundary where they part.

    With --resume compare FULL with FIRST, which was saved, and with RESUMED, which went on from there.
    """
    from tensortrace.diff import engine  # the comparison needs what --help does not

    require_resumed(resumed, asked=resume)
    if exact and floor:
        raise click.UsageError("--exact and --floor are two policies: give one of them")
    asked = requested(form, json_path, detail, force=force)
    options = engine.CompareOptions(
        policy="exact" if exact else "error-model", floor=floor, allow_missing=allow_missing,
        kinds=parse_kinds(kinds) if kinds else (), include=include, exclude=exclude, align=align,
        verify=verify, layout_a=layout_a, layout_b=layout_b, expect=expect, jobs=jobs or cores(),
    )  # fmt: skip
    if resumed is not None:
        return _resumed(a, b, resumed, options, asked)
    with Progress(sys.stderr) as progress:
        result = engine.compare(a, b, options=options, progress=progress.tell if progress.shown else None)
    deliver(result, asked, render, of_comparison, hints)
    return 0 if result else 1


def _resumed(full: Path, first: Path, resumed: Path, options: CompareOptions, asked: Delivery) -> int:
    from tensortrace.cli.render import resumed as page
    from tensortrace.diff.resume import compare_resumed

    with Progress(sys.stderr) as progress:
        tell = progress.tell if progress.shown else None
        whole = compare_resumed(full, first, resumed, options=options, progress=tell)
    deliver(whole, asked, page.render, of_resume, page.hints)
    return 0 if whole else 1
