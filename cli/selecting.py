"""The options that say which boundaries of a trace are asked for, of every command that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tensortrace.cli.completing import begun_kinds

_OPTIONS = (
    click.option("--step", "--steps", "steps", default="", metavar="init,0-3", help="Only these steps."),
    click.option(
        "--kind", "--kinds", "kinds", default="", metavar="K,…", shell_complete=begun_kinds,
        help="Only these kinds.",
    ),
    click.option("--name", metavar="GLOB", help="Only the boundaries with this name."),
    click.option("--rank", "ranks", multiple=True, type=int, metavar="N", help="Only this rank; repeatable."),
)  # fmt: skip


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command's function: ``parse_request`` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
