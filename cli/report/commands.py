"""The commands that make again what a report shows."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensortrace.cli.contents import Contents
from tensortrace.cli.render.numbers import spans
from tensortrace.cli.render.safe import safe
from tensortrace.tracer.types import Promise

LONG = 2000
NEXT = "next: "
"""What begins a hint that is a command."""


class Command(NamedTuple):
    """A shell command and what it is for."""

    purpose: str
    line: str


def commands(
    contents: Sequence[Contents], options: Sequence[str], output: str, *, hints: Sequence[str] = ()
) -> list[Command]:
    """Return how the traces were recorded, compared, and made into this page, then what to run next.

    ``options`` are those of the comparison, as they were given; three traces are those of a resume check.
    """
    names = ("the full run", "the run that was saved", "the resumed run") if len(contents) == 3 else "ab"
    found = [
        Command(f"Record {name}", _join(["trace", "record", "-o", each.path, *recorded(each.promise), "--"],
                                        each.run.command if each.run else ()))
        for name, each in zip(names, contents, strict=False)
    ]  # fmt: skip
    if len(contents) == 1:
        found[0] = found[0]._replace(purpose="Record it")
    given = [*(["--resume"] if len(contents) == 3 else []), *(each.path for each in contents), *options]
    if len(contents) > 1:
        diff = ["trace", "diff", *given]
        found.append(Command("Compare them", _join(diff)))
        found.append(Command("Every number as JSON", _join([*diff, "--json", "diff.json"])))
    found.append(Command("This page", _join(["trace", "report", *given, "-o", output])))
    found.extend(Command("See more", hint.removeprefix(NEXT)) for hint in hints if hint.startswith(NEXT))
    return found


def _join(*parts: Sequence[str]) -> str:
    return safe(shlex.join([word for part in parts for word in part]), limit=LONG)


def recorded(promise: Promise) -> Iterator[str]:
    """Yield the options of ``trace record`` that selected what was recorded."""
    if promise.steps:
        yield from ("--steps", ",".join(_range(first, last) for first, last in promise.steps))
    if promise.kinds:
        yield from ("--kinds", ",".join(promise.kinds))
    for option, globs in (("--include", promise.include), ("--exclude", promise.exclude)):
        for glob in globs:
            yield from (option, glob)
    if promise.level != "full":
        yield from ("--level", promise.level)
    for glob in promise.zoom:
        yield from ("--zoom", glob)
    if promise.keep_last:
        yield from ("--keep-last", str(promise.keep_last))
    if promise.dedup_replicas:
        yield "--dedup-replicas"


def _range(first: int, last: int) -> str:
    return spans((max(first, 0),)) if first == last else f"{max(first, 0)}-{last}"
