"""``trace report``: one HTML file about a comparison, or about one trace."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import RESUME_HELP, TRACE, comparison_options, require_resumed
from tensortrace.cli.machine import cores
from tensortrace.cli.render.document import STDOUT, refuse_existing, write_document, write_text
from tensortrace.cli.render.progress import Progress
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.tracer.selection import parse_kinds


@click.command("report", cls=Command)
@click.argument("a", type=TRACE)
@click.argument("b", type=TRACE, required=False)
@click.argument("resumed", type=TRACE, required=False, metavar="")
@click.option("--resume", is_flag=True, help=RESUME_HELP)
@click.option("-o", "--output", required=True, metavar="FILE", help="Write this HTML file; - for stdout.")
@comparison_options
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Threads; by default all cores it may use.")
@click.option("--json", "json_path", metavar="FILE", help="Write the comparison's result as JSON, too.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
def command(
    a: Path, b: Path | None, resumed: Path | None, *, resume: bool, output: str,
    floor: tuple[Path, ...], exact: bool, kinds: str,
    include: tuple[str, ...], exclude: tuple[str, ...], allow_missing: tuple[str, ...], align: str | None,
    expect: tuple[str, ...], layout_a: Path | None, layout_b: Path | None, jobs: int | None,
    json_path: str | None, force: bool, quiet: bool,
) -> None:  # fmt: skip
    """Write a report of trace B against A, or of A alone, that a browser opens without network.

    With --resume it is about FULL, FIRST, which was saved, and RESUMED, which went on from there.
    """
    from tensortrace.cli.report import making
    from tensortrace.diff.engine import CompareOptions

    require_resumed(resumed, asked=resume)
    if exact and floor:
        raise click.UsageError("--exact and --floor are two policies: give one of them")
    compared = (floor, exact, kinds, include, exclude, allow_missing, align, expect, layout_b, json_path)
    if b is None and any(compared):
        raise click.UsageError("these options are of a comparison: give a second trace")
    for path in (output, json_path):
        refuse_existing(path, force=force)
    options = CompareOptions(
        policy="exact" if exact else "error-model", floor=floor, allow_missing=allow_missing,
        kinds=parse_kinds(kinds) if kinds else (), include=include, exclude=exclude, align=align,
        layout_a=layout_a, layout_b=layout_b, expect=expect, jobs=jobs or cores(),
    )  # fmt: skip
    with Progress(sys.stderr) as progress:
        tell = progress.tell if progress.shown else None
        if b is not None and resumed is not None:
            made = making.make_resumed(a, b, resumed, options, output, tell)
        else:
            made = making.make(a, b, options, output, tell)
    write_text(made.html, output)
    if made.result is not None and json_path is not None:
        write_document(made.result, json_path)
    if not quiet and STDOUT not in (output, json_path):
        say(f"{safe(output, limit=200)}: {safe(made.headline, limit=600)}")
        say(f"next: open {safe(output, limit=200)} in a browser", err=True)
