"""``trace pack``: what fails, in one small file that replays anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import FILE, TRACE
from tensortrace.cli.completing import begun_kinds
from tensortrace.cli.render.document import refuse_existing, write_text
from tensortrace.cli.render.say import say
from tensortrace.cli.render.status import Status
from tensortrace.tracer.selection import parse_kinds
from tensortrace.tracer.settings import parse_size

if TYPE_CHECKING:
    from tensortrace.replay.objective import Name


@click.command("pack", cls=Command)
@click.argument("traces", type=TRACE, nargs=-1, required=True, metavar="A [B]")
@click.option(
    "-o", "--output", type=FILE, required=True, metavar="FILE", help="The archive, such as case.zip."
)
@click.option("--max-size", default="24MiB", metavar="SIZE", help="Most that it may take; default 24MiB.")
@click.option("--no-minimise", is_flag=True, help="Keep all boundaries.")
@click.option("--redact", is_flag=True, help="Leave out who recorded it where (docs/pack.md).")
@click.option(
    "--redact-inputs", is_flag=True, help="Replace token ids, leave out other inputs (docs/pack.md)."
)
@click.option("--pytest", "test", type=FILE, metavar="FILE", help="Write a test that replays it, too.")
@click.option(
    "--objective",
    type=click.Choice(["mean", "sum", "sequence-mean"]),
    help="Of one trace, as in `trace replay`.",
)
@click.option("--exact", is_flag=True, help="Of two traces, as all that follow: as in `trace diff`.")
@click.option("--kinds", default="", metavar="K,…", shell_complete=begun_kinds, help="As in `trace diff`.")
@click.option("--include", multiple=True, metavar="GLOB", help="As in `trace diff`.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="As in `trace diff`.")
@click.option("--allow-missing", multiple=True, metavar="GLOB", help="As in `trace diff`.")
@click.option("--align", metavar="b:N=a:M", help="As in `trace diff`.")
@click.option("--expect", multiple=True, metavar="RULE|FILE", help="As in `trace diff`.")
@click.option("--layout-a", type=FILE, metavar="FILE", help="Layout file of A.")
@click.option("--layout", "--layout-b", "layout_b", type=FILE, metavar="FILE", help="Layout file of B.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
def command(
    traces: tuple[Path, ...], *, output: Path, max_size: str, no_minimise: bool, redact: bool,
    redact_inputs: bool, test: Path | None, objective: str | None, exact: bool, kinds: str,
    include: tuple[str, ...], exclude: tuple[str, ...], allow_missing: tuple[str, ...], align: str | None,
    expect: tuple[str, ...], layout_a: Path | None, layout_b: Path | None, force: bool, quiet: bool,
) -> int:  # fmt: skip
    """Pack what the diff of traces A and B says, or the replay of A alone, into one small file.

    It holds the part of the traces that gives the verdict, and a page that says what fails, on what, and how
    to see it. `trace replay FILE` gives the same verdict, with neither the training code nor the traces.
    """
    from tensortrace.cli.render.case import packed  # what --help does not need
    from tensortrace.replay.case import Asked
    from tensortrace.replay.packing import PackOptions, pack
    from tensortrace.replay.pytest_file import pytest_file

    if len(traces) > 2:
        raise click.UsageError("give one trace, or two: the reference and the candidate")
    of_diff = exact or kinds or include or exclude or allow_missing or align or expect or layout_b
    if (len(traces) == 1 and of_diff) or (len(traces) == 2 and objective):
        raise click.UsageError(
            "--objective is of one trace alone, all other options of the verdict but --layout-a of two"
        )
    for path in (output, test):
        refuse_existing(None if path is None else str(path), force=force)
    asked = Asked(
        policy="exact" if exact else "error-model", allow_missing=allow_missing,
        kinds=parse_kinds(kinds) if kinds else (), include=include, exclude=exclude, align=align,
        objective=cast("Name | None", objective),
    )  # fmt: skip
    options = PackOptions(
        asked=asked, expect=expect, layouts=(layout_a, layout_b)[: len(traces)], minimise=not no_minimise,
        redact=redact, redact_inputs=redact_inputs, max_bytes=parse_size(max_size, option="--max-size"),
    )  # fmt: skip
    with Status(sys.stderr) as status:
        found = pack(traces, output, options=options, told=status.tell, replace_target=force)
    if test is not None:
        write_text(pytest_file(found.case, output, test), str(test))
    if not quiet:
        say(packed(found, str(output)), nl=False)
        say(f"next: trace replay {output}", err=True)
    return 0
