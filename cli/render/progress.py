"""One line on a terminal that says how much of a long comparison is done, and how long the rest may take."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TextIO

AFTER_S = 2.0
"""What takes less needs no line."""

EVERY_S = 0.2


class Progress:
    """Keeps the line from ``AFTER_S`` on, wipes it at the end; writes nothing but to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.shown = stream.isatty()
        self._stream = stream
        self._began = time.monotonic()
        self._next = self._began + AFTER_S
        self._written = False

    def tell(self, done: float, total: int) -> None:
        """Show that ``done`` of ``total`` steps are done; may be called often."""
        now = time.monotonic()
        if not self.shown or now < self._next:
            return
        self._next = now + EVERY_S
        self._written = True
        share = done / total if total else 1.0
        left = f", about {_duration((now - self._began) * (1 - share) / share)} left" if share else ""
        self._stream.write(f"\r\x1b[Kcompared {share:.0%} of {total} step{'s' * (total != 1)}{left}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._written:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
