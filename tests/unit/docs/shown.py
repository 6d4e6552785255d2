"""What README.md and the pages show of commands: lines of blocks, and options named in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tensortrace.cli.main import group

ROOT = Path(__file__).resolve().parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in DOCS if path.name != "status.md"),  # says of some what they lack
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SUBSTITUTED = re.compile(r"\$\([^)]*\)")
REDIRECTED = re.compile(r"\s(?:>>?|\|)\s.*")
OPTION = re.compile(r"--[a-z][a-z-]*")


@dataclass(frozen=True)
class Line:
    """One command of a block; ``words`` are those that the program is given, itself first."""

    page: str
    text: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def lines() -> Iterator[Line]:
    """Yield every command of the blocks marked ``sh``, and of others whose first line begins with one."""
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
            if language == "sh" or (not language and body.startswith(("trace ", "python ", "$ "))):
                yield from _of_block(page.name, body)


def _of_block(page: str, body: str) -> Iterator[Line]:
    for whole in body.replace("\\\n", " ").splitlines():
        for text in whole.removeprefix("$ ").split(" && "):
            bare = REDIRECTED.sub("", SUBSTITUTED.sub("SUBSTITUTED", text))
            words = [word.removeprefix(".venv/bin/") for word in shlex.split(bare, comments=True)]
            if words:
                yield Line(page, text.strip(), tuple(words))


def command(name: str) -> click.Command:
    """Return the command ``trace NAME``."""
    found = group.get_command(click.Context(group), name)
    assert found is not None, f"there is no trace {name}"
    return found


def parse(name: str, words: Sequence[str]) -> None:
    """Parse what ``trace NAME`` is given, without running it; raises what click does."""
    command(name).make_context(name, list(words), parent=click.Context(group, info_name="trace"))


def options(name: str) -> set[str]:
    """Return the options of ``trace NAME``."""
    of_command = command(name).get_params(click.Context(command(name)))
    return {option for parameter in of_command for option in (*parameter.opts, *parameter.secondary_opts)}


def inline() -> Iterator[tuple[str, str]]:
    """Yield what the text of each page has between backticks, with the page's name."""
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for piece in INLINE.findall(text):
            yield page.name, " ".join(piece.split())
