"""``trace watch``: how a recording gets on, read from the files that it writes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tensortrace.cli.command import Command
from tensortrace.cli.completing import TracePath
from tensortrace.cli.render.page import look_of
from tensortrace.cli.render.say import say
from tensortrace.cli.render.watched import line, render
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.watching import Snapshot, Watcher


@click.command("watch", cls=Command)
@click.argument("trace", type=TracePath())
@click.option(
    "--interval", type=click.FloatRange(0.1), default=2.0, show_default=True, metavar="SECONDS",
    help="Between two looks.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option(
    "--hang-after", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS",
    help="Say which rank the others wait for when none has moved for so long; 0 never.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each look, a line each.")
def command(trace: Path, *, interval: float, once: bool, hang_after: float, as_json: bool) -> int:
    """Show how the recording in TRACE gets on: where each rank is, how fast it writes, who waits for whom.

    Reads files alone: the recording neither knows nor waits. Ends when the recording does.
    """
    if not trace.is_dir():
        raise BadRequest(f"{trace}: no such folder", remedy="start `trace record` first")
    watcher = Watcher(trace, stale_after_s=hang_after)
    with _shown(as_json=as_json, whole=once) as show:
        while True:
            snapshot = watcher.look()
            show(snapshot)
            if once or snapshot.over:
                return 0
            time.sleep(interval)


@contextlib.contextmanager
def _shown(*, as_json: bool, whole: bool) -> Iterator[Callable[[Snapshot], None]]:
    """Yield what shows a moment: a table in its place on a terminal, else a line each, or the table alone."""
    look = look_of(sys.stdout)
    if as_json:
        yield lambda snapshot: click.echo(snapshot.to_json())
    elif whole:
        yield lambda snapshot: say(render(snapshot, look=look), nl=False, color=look.color)
    elif not sys.stdout.isatty():
        yield lambda snapshot: say(f"{time.strftime('%H:%M:%S')} {line(snapshot)}")
    else:
        with Live(console=Console(), auto_refresh=False) as live:
            yield lambda snapshot: live.update(Text.from_ansi(render(snapshot, look=look)), refresh=True)
