"""``trace compact``: a finished trace with its tensors compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import TRACE
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.tracer.compact import compact


@click.command("compact", cls=Command)
@click.argument("trace", type=TRACE)
@click.option(
    "--compress", type=click.Choice(["planes", "best"]), default="planes",
    help="As with `trace record`: fast, or as far as possible.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
def command(trace: Path, *, compress: str, quiet: bool) -> int:
    """Compress what recording took as it was in TRACE, a finished trace.

    The new trace takes the old one's place once it is complete and every digest in it is verified. Until
    then the old one stays as it is; disk space for both is needed.
    """
    before, after = compact(trace, compress=cast(Literal["planes", "best"], compress))
    if not quiet:
        saved = f"{100 * (1 - after / before):.0f} % less" if after < before else "nothing to gain"
        say(f"{safe(str(trace))}: {before / 1e6:,.1f} MB before, {after / 1e6:,.1f} MB now ({saved})")
    return 0
