"""``trace layout``: find the layout of a run, or check one."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import FILE, TRACE
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace


@click.command("layout", cls=Command)
@click.argument("traces", type=TRACE, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=FILE, metavar="FILE", help="Where to write the layout of the last trace."
)
@click.option(
    "--check", "checked", type=FILE, metavar="FILE", help="Check this layout instead of finding one."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def command(traces: tuple[Path, ...], *, output: Path | None, checked: Path | None, force: bool) -> int:
    """Find where the ranks of trace B hold parts of the whole tensors of trace A, and write it to a file.

    With --check FILE, say whether that layout fits trace B (and A's shapes, where A is given).
    """
    if checked is not None:
        if output is not None or len(traces) > 2:
            raise click.UsageError("--check takes one trace, or A and B, and no -o")
        return _check(checked, traces)
    if output is None or len(traces) != 2:
        raise click.UsageError("give A, B and -o FILE, or --check FILE and a trace")
    return _find(traces[0], traces[1], output, force=force)


def _find(a: Path, b: Path, output: Path, *, force: bool) -> int:
    from tensortrace.diff.infer import find_layout, write_layout

    if output.exists() and not force:
        raise BadRequest(f"output {output} exists", remedy="choose another or pass --force")
    with Trace.open(a) as trace_a, Trace.open(b) as trace_b:
        found = find_layout(trace_a, trace_b)
    output.write_text(write_layout(found, a=safe(str(a)), b=safe(str(b))), encoding="utf-8")
    axes = " x ".join(f"{axis} {size}" for axis, size in found.axes.items()) or "one rank"
    count = f"{counted(len(found.rules), 'rule')}, {counted(len(found.renames), 'rename')}"
    say(f"{safe(str(output))}: {axes}; {count}")
    for note in found.notes:
        say(f"note: {safe(note, limit=1000)}")
    for doubt in found.doubts:
        say(f"doubt: {safe(doubt, limit=1000)}")
    for swap in found.swaps:
        say(f"swap: {safe(swap, limit=1000)}")
    for name in found.undecided:
        say(f"undecided: {safe(name, limit=1000)}")
    paths = shlex.join([safe(str(path), limit=400) for path in (a, b)])
    say(f"next: trace diff {paths} --layout {shlex.quote(safe(str(output), limit=400))}", err=True)
    return 1 if found.swaps or found.doubts or found.undecided else 0


def _check(path: Path, traces: tuple[Path, ...]) -> int:
    from tensortrace.diff.audit import Shapes, audit, shapes_of
    from tensortrace.tracer.rules import RunLayout

    shapes: Shapes = {}
    if len(traces) == 2:
        with Trace.open(traces[0]) as trace_a:
            shapes = shapes_of(trace_a)
    with Trace.open(traces[-1]) as trace:
        problems = audit(trace, RunLayout.load(path), shapes)
    for problem in problems:
        say(safe(problem, limit=1000))
    told = f"does not fit: {counted(len(problems), 'problem')}" if problems else "fits"
    say(
        f"{safe(str(path))}: {told} {safe(str(traces[-1]))}" if not problems else f"{safe(str(path))}: {told}"
    )
    return 1 if problems else 0
