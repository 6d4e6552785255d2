"""``trace completion``: the script that lets a shell complete ``trace``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tensortrace.cli.command import Command

VARIABLE = "_TRACE_COMPLETE"
"""What click looks for when a shell asks it; the name follows from the program's."""


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the script that completes subcommands, options, kinds and folders of traces in SHELL."""
    kind = get_completion_class(shell)
    root = click.get_current_context().find_root()
    assert kind is not None
    click.echo(kind(root.command, {}, "trace", VARIABLE).source(), nl=False)
