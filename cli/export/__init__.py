"""``trace export``: a trace, or a comparison, in the formats of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import FILE, TRACE
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.cli.selecting import selection_options
from tensortrace.tracer.request import parse_request

ONE, BOTH = ("safetensors", "npz", "chrome"), ("tensorboard", "wandb")
"""Formats of one trace's tensors and boundaries, and those of numbers over steps, of one trace or of two."""


@click.command("export", cls=Command)
@click.argument("a", type=TRACE)
@click.argument("b", type=TRACE, required=False)
@click.option("-o", "--output", required=True, type=FILE, help="Write this.")
@click.option("--format", "form", required=True, type=click.Choice([*ONE, *BOTH]), help="For which tool.")
@selection_options
@click.option(
    "--global/--local", "whole", default=None,
    help="Tensors put together from all ranks (the default), or what each rank holds.",
)  # fmt: skip
@click.option("--layout", "layout", type=FILE, metavar="FILE", help="Layout file of the last trace.")
@click.option("--force", is_flag=True, help="Replace what exists.")
def command(
    a: Path, b: Path | None, *, output: Path, form: str, steps: str, kinds: str, name: str | None,
    ranks: tuple[int, ...], whole: bool | None, layout: Path | None, force: bool,
) -> None:  # fmt: skip
    """Write what is selected of trace A, or how far trace B is from the reference A, for another tool.

    safetensors, npz: the tensors. chrome: a slice for each boundary, for Perfetto. tensorboard, wandb: of
    one trace loss, norms and schedule over the steps; of two the error of each boundary.
    """
    if b is not None and form in ONE:
        raise click.UsageError(f"--format {form} takes one trace; of two: {', '.join(BOTH)}")
    if ranks and b is not None:
        raise click.UsageError("--rank is of one trace: a comparison is of global tensors")
    if whole is not None and form not in ("safetensors", "npz"):
        raise click.UsageError("--global and --local are for the formats that hold tensors: safetensors, npz")
    from tensortrace.cli.export import making

    request = parse_request(steps=steps, kinds=kinds, name=name, ranks=ranks)
    asked = making.Asked(a, b, request, making.LOCAL if whole is False else making.GLOBAL, layout)
    told = making.make(asked, form, output, force=force)
    for note in told.notes:
        say(f"note: {safe(note, limit=600)}", err=True)
    say(f"{safe(str(output))}: {safe(told.text, limit=600)}")
    say(f"next: {told.next}", err=True)
