"""What is run: one command for each combination of a matrix's values, looked through before it starts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tensortrace.replay.validate.repository import Repository
from tensortrace.tracer.errors import BadRequest

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[^A-Za-z0-9._+=-]+")
_PLACEHOLDER = re.compile(
    r"<[A-Za-z][\w .-]*>|\{[A-Za-z_]\w*\}|\bTODO\b|\bFIXME\b|(?:^|[=/ ])path/to/|\.\.\.$"
)

ONLY = "run"
"""The name of the one cell where there is no matrix."""


class Cell(NamedTuple):
    """One command, and what distinguishes it from the others: ``name`` is that of its folder."""

    name: str
    command: tuple[str, ...]


def expand(command: Sequence[str], matrix: Iterable[str]) -> tuple[Cell, ...]:
    """Return the cells of ``KEY=V1,V2`` for each key: every combination, put where ``{KEY}`` stands.

    Raises BadRequest for a key that the command does not use, values that make one name, and for what is no
    such text.
    """
    axes = [_axis(text, command) for text in matrix]
    if len({key for key, _ in axes}) < len(axes):
        raise BadRequest("option --matrix", found="a key twice", expected="all values of a key together")
    cells = []
    for values in itertools.product(*(values for _, values in axes)):
        chosen = {key: value for (key, _), value in zip(axes, values, strict=True)}
        words = tuple(_fill(word, chosen) for word in command)
        name = "-".join(f"{key}={value}" for key, value in chosen.items()) or ONLY
        cells.append(Cell(_NAME.sub("_", name), words))
    if len({cell.name for cell in cells}) < len(cells):
        raise BadRequest("option --matrix", found="values that look alike", expected="different ones")
    return tuple(cells)


def _axis(text: str, command: Sequence[str]) -> tuple[str, list[str]]:
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if not equals or not _KEY.fullmatch(key) or not values:
        raise BadRequest("option --matrix", found=repr(text), expected="KEY=V1,V2 such as nproc=1,2")
    if not any(f"{{{key}}}" in word for word in command):
        raise BadRequest(
            f"option --matrix: the command has no {{{key}}}",
            remedy=f"write {{{key}}} where its values belong, such as --nproc-per-node {{{key}}}",
        )
    return key, values


def _fill(word: str, chosen: dict[str, str]) -> str:
    for key, value in chosen.items():
        word = word.replace(f"{{{key}}}", value)
    return word


def look_through(
    cells: Iterable[Cell], repository: Repository, commits: Sequence[str], copied: Sequence[Path]
) -> None:
    """Raise BadRequest for a command that would not run the commits' own files, or is not filled in.

    ``copied`` are paths of the checkout that every run is given beside its commit's.
    """
    for cell in cells:
        for word in cell.command:
            if found := _PLACEHOLDER.search(word):
                raise BadRequest(
                    f"a placeholder is left in the command: {found[0].strip('=/ ')!r}", found=repr(word),
                    remedy="fill it in, or give its values with --matrix KEY=V1,V2",
                )  # fmt: skip
            for path in _paths(word):
                _look_at(path, word, repository, commits, copied)


def _paths(word: str) -> Iterator[Path]:
    """Yield what a word of a command may name: itself, and what stands behind its first ``=``."""
    for text in dict.fromkeys((word, word.partition("=")[2])):
        if text and not text.startswith("-") and "\0" not in text and len(text) < 4096:
            yield Path(text)


def _look_at(
    path: Path, word: str, repository: Repository, commits: Sequence[str], copied: Sequence[Path]
) -> None:
    root = repository.root.resolve()
    here = root / repository.prefix
    target = _lexical(here / path)
    if not target.is_relative_to(root) or target == root or not target.exists():
        return
    if path.is_absolute():
        raise BadRequest(
            f"{word!r} names a file of this checkout, whatever commit runs",
            expected=f"a path relative to {here}, which each commit has for itself",
        )
    if any(target == each or target.is_relative_to(each) for each in copied):
        return
    inside = target.relative_to(root).as_posix()
    missing = [commit for commit in commits if not repository.holds(commit, inside)]
    if missing:
        raise BadRequest(
            f"{word!r} is here, but not in commit {missing[0][:12]}",
            remedy=f"commit it, or give it to every run with --copy {path}",
        )


def _lexical(path: Path) -> Path:
    """Return a path without dots, which need not exist; links stay."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return Path(*parts)
