"""Print on stdout or stderr, whatever their encoding: a result must not die of a character."""

from __future__ import annotations

import sys

import click


def say(text: str, *, err: bool = False, color: bool = False, nl: bool = True) -> None:
    """Print a text; what the stream's encoding lacks becomes ``?``, as in a Latin-1 terminal.

    An error here would end in exit code 1, which means divergent.
    """
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    printable = text.encode(encoding, "replace").decode(encoding)
    click.echo(printable, nl=nl, err=err, color=color or None)
