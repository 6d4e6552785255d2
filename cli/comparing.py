"""The options that every command with a comparison in it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tensortrace.cli.completing import TracePath, begun_kinds

FILE = click.Path(path_type=Path)
TRACE = TracePath()

RESUME_HELP = "Compare FULL FIRST RESUMED: a run, one that was saved, and one that went on from there."

_NAMES: dict[str, Any] = {"multiple": True, "metavar": "GLOB"}
_OPTIONS = (
    click.option(
        "--floor", multiple=True, type=TRACE, metavar="A2", help="Another run of a's code; repeatable."
    ),
    click.option("--exact", is_flag=True, help="Demand bitwise equality."),
    click.option(
        "--kinds", default="", metavar="K,…", shell_complete=begun_kinds, help="Compare only these kinds."
    ),
    click.option("--include", **_NAMES, help="Compare only these names; repeatable."),
    click.option("--exclude", **_NAMES, help="Leave these names out; repeatable."),
    click.option("--allow-missing", **_NAMES, help="Names that one may lack; repeatable."),
    click.option("--align", metavar="b:N=a:M", help="Compare step N of b with step M of a, and so on."),
    click.option(
        "--expect", multiple=True, metavar="RULE|FILE", help="Differences that are meant; repeatable."
    ),
    click.option("--layout-a", type=FILE, metavar="FILE", help="Layout file of a (docs/layouts.md)."),
    click.option("--layout", "--layout-b", "layout_b", type=FILE, metavar="FILE", help="Layout file of b."),
)


def comparison_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command's function, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def require_resumed(resumed: Path | None, *, asked: bool) -> None:
    """Refuse a third trace without ``--resume``, and that without a third trace."""
    if asked and resumed is None:
        raise click.UsageError("--resume takes three traces: FULL FIRST RESUMED")
    if resumed is not None and not asked:
        raise click.UsageError(f"unexpected third trace {resumed}: three are for --resume")
