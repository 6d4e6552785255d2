"""A result as GitHub's workflow commands, which become annotations, and what goes to the step's summary."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tensortrace.cli.formats.summary import Notice, Summary
from tensortrace.cli.render.finding import SENTENCE
from tensortrace.cli.render.safe import safe

AT_MOST = 10
"""Annotations of one level that GitHub shows of a step; more are dropped."""

TITLE, MESSAGE = 255, 4096
"""Greatest lengths, in characters; GitHub cuts or refuses what is longer."""

SUMMARY_BYTES = 1 << 20
"""The most that a step may put into its summary: of a larger file GitHub shows nothing."""

Place = Callable[[str], tuple[Path, int] | None]
"""Finds the file and line of a source such as ``train.py:12``, None where there is none."""


def github(summary: Summary, place: Place) -> str:
    """Return the annotations, then the text and the next commands, in which the runner obeys nothing.

    The runner takes commands from every line of a step's output, also from one that begins with a name out
    of a trace: the text stands between ``stop-commands`` and a word that nobody can guess.
    """
    told: Counter[str] = Counter()
    lines = []
    for notice in summary.notices:
        told[notice.level] += 1
        if told[notice.level] <= AT_MOST:
            lines.append(_annotation(notice, place))
    word = uuid.uuid4().hex
    commands = "".join(f"next: {safe(command, limit=SENTENCE)}\n" for command in summary.commands)
    return "\n".join([*lines, f"::stop-commands::{word}", f"{summary.text}{commands}::{word}::"]) + "\n"


def append_summary(text: str, path: Path) -> bool:
    """Append Markdown to a step's summary; tell whether there was room and it could be written."""
    try:
        with path.open("ab") as file:
            document = text.encode("utf-8", "replace") + b"\n"
            if file.tell() + len(document) > SUMMARY_BYTES:
                return False
            file.write(document)
    except OSError:
        return False
    return True


def _annotation(notice: Notice, place: Place) -> str:
    where = place(notice.source) if notice.source else None
    properties = {} if where is None else {"file": where[0].as_posix(), "line": str(where[1])}
    properties["title"] = safe(notice.title, limit=TITLE)
    message = "\n".join(safe(line, limit=SENTENCE) for line in notice.lines)[:MESSAGE]
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::{notice.level} {given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
