"""A result as Markdown: for a pull request's comment, or a step's summary."""

from __future__ import annotations

import re

from tensortrace.cli.formats.summary import Section, Summary, Table
from tensortrace.cli.render.finding import SENTENCE
from tensortrace.cli.render.safe import safe

LIMIT = 60_000
"""Greatest length in characters; a comment on GitHub holds 65,536."""

LINES = 20
"""Lines of a section."""

_SHOWN = {character: f"\\{character}" for character in "\\`*_[]~$"} | {
    "&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "@": "`@`", "#": "`#`",
}  # fmt: skip
_LINKS = re.compile(r"(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.I)
_MARKS = re.compile(r"^(\d{0,9})(?=[-+=.)])")
"""What at the start of a line would make a list or a rule of it."""

_BEFORE = r"\1\\"


def markdown(summary: Summary) -> str:
    """Return the result as Markdown, at most ``LIMIT`` characters; the end says what is left out."""
    rest = escaped(summary.rest)
    joint = "" if rest.startswith(":") else " "
    parts = [f"**{escaped(summary.verdict.upper())}**{joint}{rest}\n"]
    parts += [_section(section) for section in summary.sections if section.lines or section.table]
    if summary.commands:
        parts.append(f"**Next**\n\n{_fenced(summary.commands)}\n")
    return "\n".join(_bounded(parts))


def escaped(text: str, *, limit: int = SENTENCE) -> str:
    """Return a text as Markdown that shows it literally, on one line.

    No markup, HTML, link, formula or entity comes of it, and nobody is notified: a name in a trace may be
    ``@somebody``, and text in code is no mention.
    """
    shown = "".join(_SHOWN.get(character, character) for character in safe(text, limit=limit))
    return _LINKS.sub(r"\\", shown)


def _section(section: Section) -> str:
    title = f"**{escaped(section.title)}**\n\n" if section.title else ""
    lines = "".join(f"- {_MARKS.sub(_BEFORE, escaped(line))}\n" for line in section.lines[:LINES])
    table = _table(section.table) if section.table else ""
    more = len(section.lines) - LINES
    return f"{title}{table}{lines}" + (f"- … {more:,} more in the JSON document\n" if more > 0 else "")


def _table(table: Table) -> str:
    rows = [table.header, ("---",) * len(table.header)]
    rows += [tuple(escaped(cell) for cell in row) for row in table.rows]
    left_out = f"\n{table.left_out:,} more in the JSON document\n" if table.left_out else ""
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + left_out


def _fenced(lines: tuple[str, ...]) -> str:
    text = "\n".join(safe(line, limit=SENTENCE) for line in lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


def _bounded(parts: list[str]) -> list[str]:
    """Return the parts that fit, in their order, and how many do not."""
    kept: list[str] = []
    room = LIMIT - 100  # for the last line
    for part in parts:
        if len(part) < room:
            room -= len(part) + 1
            kept.append(part)
    left_out = len(parts) - len(kept)
    return [*kept, f"{left_out} more in the JSON document: too long to stand here\n"] if left_out else kept
