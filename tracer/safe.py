"""Strings from traces made safe to print: no control characters, one line, bounded length."""

from __future__ import annotations

import unicodedata

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

# Controls (escape sequences), formats (bidirectional overrides), surrogates, private use, unassigned:
# each can move the cursor, recolour or reorder a terminal, or fail to encode.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})

_MARKS = frozenset({"Mn", "Me"})
_MARKS_IN_A_ROW = 2
"""Combining marks kept in a row; more of them would be drawn over the lines above and below."""


def safe(text: str, *, limit: int = 200) -> str:
    """Return the text on one line of at most ``limit`` characters, with nothing that drives a terminal.

    White space becomes single spaces, unsafe characters U+FFFD; the middle of a longer text is left out,
    since names differ at their ends.
    """
    half = 4 * limit
    if len(text) > 2 * half:  # cut first, so that a huge string costs nothing
        text = text[:half] + ELLIPSIS + text[-half:]
    return _middle_cut(_clean(text), limit)


def _clean(text: str) -> str:
    if text.isascii() and text.isprintable():
        return " ".join(text.split())
    kept: list[str] = []
    marks = 0
    for char in " ".join(text.split()):
        category = unicodedata.category(char)
        marks = marks + 1 if category in _MARKS else 0
        if marks <= _MARKS_IN_A_ROW:
            kept.append(REPLACEMENT if category in _UNSAFE else char)
    return "".join(kept)


def _middle_cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - 1 - head
    return text[:head] + ELLIPSIS + (text[-tail:] if tail else "")
