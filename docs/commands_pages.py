"""Writes a page for each command of ``trace`` from its click command, into docs/commands, as Sphinx begins.

The help of a command is text in which stars and bars are themselves; so is it here.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tensortrace.cli.main import COMMANDS, group
from tensortrace.cli.manual import MANUALS, Manual

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FOLDER = "commands"
MARKUP = re.compile(r"([\\*_{}\[\]<>|#$~])")
PAGE = re.compile(r"docs/(\w+\.md)")


def pages() -> dict[str, str]:
    """Return the text of each page by its name, ``index`` and one for each command."""
    context = click.Context(group, info_name="trace")
    names = group.list_commands(context)
    found = {name: command_page(name, group.get_command(context, name)) for name in names}
    return {"index": index(names), **found}


def index(names: list[str]) -> str:
    """Return the page that lists the commands."""
    rows = "".join(f"| [`trace {name}`]({name}.md) | {plain(COMMANDS[name])} |\n" for name in names)
    entries = "".join(f"trace {name} <{name}>\n" for name in names)
    return "\n".join(
        [
            "# Commands\n",
            *paragraphs(inspect.cleandoc(group.help or "")),
            *ending(MANUALS["trace"]),
            "## All commands\n",
            f"| command | |\n|---|---|\n{rows}",
            f"Written from `trace COMMAND --help` of version {version()}.\n",
            f"```{{toctree}}\n:hidden:\n\n{entries}```\n",
        ]
    )


def version() -> str:
    """Return the version that is installed."""
    return importlib.metadata.version("tensortrace")


def command_page(name: str, command: click.Command | None) -> str:
    """Return the page of one command: what it does, how it is called, its options."""
    assert command is not None, name
    context = click.Context(command, info_name=f"trace {name}")
    usage = " ".join([f"trace {name}", *command.collect_usage_pieces(context)])
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    return "\n".join(
        [
            f"# trace {name}\n",
            f"```text\n{usage}\n```\n",
            *paragraphs(command.help or ""),
            *ending(MANUALS[name]),
            "## Options\n",
            *(entry for option in options for entry in described(option, context)),
        ]
    )


def paragraphs(text: str) -> Iterator[str]:
    """Yield a help's paragraphs as Markdown."""
    for paragraph in text.split("\n\n"):
        yield f"{plain(' '.join(paragraph.split()))}\n"


def ending(manual: Manual) -> Iterator[str]:
    """Yield what a help ends with: examples, then a table of exit codes."""
    yield f"## Examples\n\n```sh\n{inspect.cleandoc(manual.examples)}\n```\n"
    rows = "\n".join(f"| {plain(code)} | {plain(meaning)} |" for code, meaning in manual.exit_codes.items())
    yield f"## Exit codes\n\n| code | |\n|---|---|\n{rows}\n"


def described(option: click.Option, context: click.Context) -> Iterator[str]:
    """Yield an option as an entry of a definition list."""
    if record := option.get_help_record(context):
        term, text = record
        yield f"`{term}`\n: {plain(text)}\n"


def plain(text: str) -> str:
    """Return text of which Markdown leaves every character as it is, but for what is between backticks."""
    pieces = text.split("`")
    marked = "`".join(piece if n % 2 else MARKUP.sub(r"\\\1", piece) for n, piece in enumerate(pieces))
    return PAGE.sub(r"[\g<0>](../\1)", marked)


def write(app: Sphinx) -> None:
    """Write the pages that have changed, and remove those of commands that are gone."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    texts = {f"{name}.md": text for name, text in pages().items()}
    for old in folder.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Have the pages written before Sphinx looks for sources."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
