"""``trace check``: every index line and every digest of a trace."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import TRACE
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.tracer.reader import Trace, check


@click.command("check", cls=Command)
@click.argument("trace", type=TRACE)
@click.option("-q", "--quiet", "quiet", is_flag=True, help="Print nothing; the exit code tells.")
def command(trace: Path, *, quiet: bool) -> int:
    """Verify every index line and every digest of TRACE, and list everything that is wrong."""
    problems = 0
    for problem in check(trace):
        problems += 1
        if not quiet:
            say(safe(problem, limit=1000))
    if not quiet:
        say(_verdict(trace, problems))
        if problems:
            say(
                f"next: trace show {shlex.quote(safe(str(trace), limit=400))}  # what can still be read",
                err=True,
            )
    return 1 if problems else 0


def _verdict(trace: Path, problems: int) -> str:
    """Return the last line; the counts of an intact trace say how much was verified."""
    path = safe(str(trace))
    if problems:
        return f"{path}: not intact: {counted(problems, 'problem')}"
    ranks = Trace.open(trace).ranks
    boundaries = counted(sum(len(rank.entries) for rank in ranks), "boundary")
    return f"{path}: intact: every digest of {boundaries} on {counted(len(ranks), 'rank')} holds"
