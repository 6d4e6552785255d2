"""One line on a terminal that is written again and again, and wiped at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

EVERY_S = 0.2


class Line:
    """Keeps the line; writes nothing but to a terminal, and nothing in the first ``after_s`` seconds."""

    def __init__(self, stream: TextIO, *, after_s: float = 0.0) -> None:
        self.shown = stream.isatty()
        self.began = time.monotonic()
        self._stream = stream
        self._next = self.began + after_s
        self._written = False

    def is_due(self) -> bool:
        """Tell whether a text would be shown now."""
        return self.shown and time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Show a text in the place of the one before, if it is due."""
        if not self.is_due():
            return
        self._next = time.monotonic() + EVERY_S
        self._written = True
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
