"""What a recorded process says to people: single lines on stderr, never on stdout, never raising."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Write one line to stderr, if there is one; safe on any thread and at interpreter exit."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"tensortrace: {' '.join(text.split())}\n")
        sys.stderr.flush()


def describe(error: BaseException) -> str:
    """Return an error as one short line: its type and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
