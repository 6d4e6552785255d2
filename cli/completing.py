"""What a shell is offered behind an option or in the place of an argument: kinds, folders of traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from tensortrace.tracer import layout
from tensortrace.tracer.types import Kind

MOST = 500
"""Folders that are looked into: completion must not wait."""


class TracePath(click.Path):
    """A path to a trace: folders of traces are offered, and on the way to them other folders."""

    def __init__(self, otherwise: str = "dir") -> None:
        """Offer what the shell finds of the type ``otherwise``, dir or file, where no trace fits."""
        super().__init__(path_type=Path)
        self._otherwise = otherwise

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return traces and the folders beside them, or leave it to the shell where there is no trace."""
        found = list(_folders(incomplete))
        if not any(is_trace for _, is_trace in found):
            return [CompletionItem(incomplete, type=self._otherwise)]
        return [CompletionItem(name if is_trace else f"{name}/") for name, is_trace in found]


def begun_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the kinds that may stand at the end of a comma-separated list."""
    before, comma, begun = incomplete.rpartition(",")
    given = before.split(",")
    return [f"{before}{comma}{kind}" for kind in Kind if kind.startswith(begun) and kind not in given]


def _folders(incomplete: str) -> Iterator[tuple[str, bool]]:
    """Yield the folders whose paths begin so, as typed, each with whether it is a trace."""
    head, slash, begun = incomplete.rpartition("/")
    typed = head + slash
    try:
        names = sorted(each.name for each in Path(typed or ".").iterdir() if each.name.startswith(begun))
    except OSError:
        return
    for name in names[:MOST]:
        folder = Path(typed + name)
        if folder.is_dir() and (begun.startswith(".") or not name.startswith(".")):
            yield typed + name, (folder / layout.MANIFEST).is_file()
