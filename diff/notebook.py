"""HTML in which notebooks show results and traces: small, styled by itself alone, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tensortrace.tracer.safe import safe

MARKS = {"good": "#2a7d46", "bad": "#b3261e", "open": "#8a6100"}
"""Colours of what holds, does not, and could not be told: at least 4.5 to 1 on white."""

_CELL = 'style="text-align:left;vertical-align:top;padding:1px 12px 1px 0"'


def card(headline: str, *parts: str, mark: str = "") -> str:
    """Return a box with a headline, and parts that are HTML already; ``mark`` is one of ``MARKS``."""
    edge = MARKS.get(mark, "#888")
    return (
        f'<div style="border-left:4px solid {edge};padding:2px 0 2px 12px;max-width:72em">'
        f"<div><b>{text(headline)}</b></div>{''.join(parts)}</div>"
    )


def text(words: str, *, limit: int = 600) -> str:
    """Return words from a trace as HTML: one line without controls, with nothing that is markup."""
    return escape(safe(words, limit=limit))


def table(rows: Iterable[Sequence[str]], *, head: Sequence[str] = ()) -> str:
    """Return a table of texts; empty where there are no rows."""
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    top = "".join(f"<th {_CELL}>{text(cell)}</th>" for cell in head)
    return f"<table>{f'<tr>{top}</tr>' if top else ''}{body}</table>" if body else ""


def listing(title: str, lines: Sequence[str], *, most: int = 8) -> str:
    """Return a folded list with its number of lines; of more than ``most`` the first ones."""
    if not lines:
        return ""
    shown = "".join(f"<li>{text(line)}</li>" for line in lines[:most])
    more = f"<li>… and {len(lines) - most:,} more</li>" if len(lines) > most else ""
    return f"<details><summary>{text(title)} ({len(lines):,})</summary><ul>{shown}{more}</ul></details>"
