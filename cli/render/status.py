"""One line on a terminal that says what a long command is at."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

EVERY_S = 0.2
WIDTH = 79


class Status:
    """Keeps the line, wipes it at the end; writes nothing but to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._next = 0.0
        self._written = False

    def tell(self, text: str) -> None:
        """Show a text in the place of the one before; may be called often."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + EVERY_S
        self._written = True
        self._stream.write(f"\r\x1b[K{text[:WIDTH]}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
