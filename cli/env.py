"""The command ``trace env``: the environment that a recording started here would note."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from tensortrace.cli.command import Command
from tensortrace.cli.render.safe import safe
from tensortrace.tracer.environment import launch_environment, torch_flags
from tensortrace.tracer.types import Environment


@click.command("env", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as a trace holds it.")
def command(as_json: bool) -> int:
    """Print the versions, flags and variables that a recording started here would note.

    Paste it into a bug report: it holds allow-listed variables only, with credentials masked.
    """
    environment = launch_environment((), os.environ, folder=Path.cwd())
    environment = msgspec.structs.replace(environment, flags=torch_flags())
    if as_json:
        click.echo(msgspec.json.encode(environment).decode())
    else:
        click.echo("\n".join(_lines(environment)))
    return 0


def _lines(environment: Environment) -> list[str]:
    """Return the environment as sections of aligned names and values."""
    commit = environment.commit or "not in a git repository"
    state = {"commit": commit + (" (with changes)" if environment.dirty else "")}
    sections = {
        "versions": environment.versions,
        "git": state,
        "flags": environment.flags,
        "variables": environment.variables or {"none of those that matter": "is set"},
    }
    return [line for title, values in sections.items() for line in (title, *_table(values))]


def _table(values: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in values)
    return [f"  {name:{width}}  {safe(text)}" for name, text in values.items()]
