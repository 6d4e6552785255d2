"""``trace show``: what is in a trace, or one of its tensors."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import TRACE
from tensortrace.cli.contents import contents_of
from tensortrace.cli.modules import tree_of
from tensortrace.cli.render import show
from tensortrace.cli.render.document import refuse_existing, write_document
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.page import Page, look_of
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.cli.render.tree import tree
from tensortrace.cli.selecting import selection_options
from tensortrace.cli.tensors import Found, document
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.request import Request, parse_request

ROWS = 40
"""Tensors that are listed, one a line."""

WHOLE = 8
"""Tensors that are shown in full; with ``--values`` always in full."""


@click.command("show", cls=Command)
@click.argument("trace", type=TRACE)
@selection_options
@click.option("--tree", "as_tree", is_flag=True, help="The modules that the selection is in, a line each.")
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Levels of the tree; default what fits.")
@click.option("--values", is_flag=True, help="Print values too; each tensor's digest is checked.")
@click.option("--json", "json_path", metavar="FILE", help="Write JSON instead; - for stdout.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def command(
    trace: Path, *, steps: str, kinds: str, name: str | None, ranks: tuple[int, ...],
    as_tree: bool, depth: int | None, values: bool, json_path: str | None, force: bool,
) -> None:  # fmt: skip
    """Say what is in TRACE; with a selection, show the tensors that it matches.

    One boundary is shown in full, several as a list. With --tree or --depth all that is selected is summed
    by modules. What of a damaged trace can be read is shown.
    """
    as_tree = as_tree or depth is not None
    if as_tree and (values or json_path is not None):
        raise click.UsageError("--tree sums up: --values and --json are of single tensors")
    refuse_existing(json_path, force=force)
    request = parse_request(steps=steps, kinds=kinds, name=name, ranks=ranks)
    if values and not request:
        raise click.UsageError("--values needs --step, --kind, --name or --rank: which tensors?")
    opened = Trace.open(trace, on_damage="salvage")
    if json_path is not None:
        write_document(document(opened, request, with_values=values), json_path)
        return
    look = look_of(sys.stdout)
    page = Page(look)
    if as_tree:
        found = Found(opened, request)
        page.line((safe(str(opened.path), limit=160), "bold"), f": {_selected(found)}")
        tree(page, tree_of((rank.rank, entry) for rank, entry in found.matches), depth=depth)
    elif request:
        _tensors(page, Found(opened, request), values)
    else:
        show.summary(page, contents_of(opened))
    say(page.text(), nl=False, color=look.color)
    say(f"next: trace {_next(opened, request, as_tree=as_tree)}", err=True)


def _selected(found: Found) -> str:
    names = {entry.name for _, entry in found.matches}
    return f"{counted(len(found.matches), 'boundary')} of {counted(len(names), 'name')}"


def _tensors(page: Page, found: Found, values: bool) -> None:
    whole = values or len(found.keys()) == 1
    shown = found.matches[: WHOLE if whole else ROWS]
    left_out = len(found.matches) - len(shown)
    if whole:
        for match in shown:
            show.tensor(page, found.row(match), found.read(match) if values else None)
        show.leave_out(page, left_out)
    else:
        show.listing(page, [found.row(match) for match in shown], left_out=left_out)


def _next(trace: Trace, request: Request, *, as_tree: bool) -> str:
    path = shlex.quote(safe(str(trace.path), limit=400))
    if request:
        return f"check {path}"
    if not as_tree:
        return f"show {path} --tree"
    first = next((entry for rank in trace.ranks for entry in rank.entries), None)
    return f"show {path} --kind {first.kind}" if first else f"check {path}"
