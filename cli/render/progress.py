"""One line on a terminal that says how much of a long comparison is done, and how long the rest may take."""

from __future__ import annotations

import time
from typing import TextIO

from tensortrace.cli.render.line import Line

AFTER_S = 2.0
"""What takes less needs no line."""


class Progress(Line):
    """Keeps the line from ``AFTER_S`` on, wipes it at the end; writes nothing but to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, after_s=AFTER_S)

    def tell(self, done: float, total: int) -> None:
        """Show that ``done`` of ``total`` steps are done; may be called often."""
        if not self.is_due():
            return
        share = done / total if total else 1.0
        spent = time.monotonic() - self.began
        left = f", about {duration(spent * (1 - share) / share)} left" if share else ""
        self.show(f"compared {share:.0%} of {total} step{'s' * (total != 1)}{left}")


def duration(seconds: float) -> str:
    """Return a length of time in words: ``12 s``, ``3 min 5 s``, ``2 h 7 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
