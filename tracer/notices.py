"""What a recorded process says to people: single lines on stderr, never on stdout, never raising."""

from __future__ import annotations

import os
from contextlib import suppress


def say(text: str) -> None:
    """Write one line to stderr, if there is one; safe on any thread and at interpreter exit.

    Goes past ``sys.stderr``, whose lock another thread may hold for ever after a fork.
    """
    with suppress(OSError):
        os.write(2, f"tensortrace: {' '.join(text.split())}\n".encode(errors="replace"))


def describe(error: BaseException) -> str:
    """Return an error as one short line: its type and what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
