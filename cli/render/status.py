"""One line on a terminal that says what a long command is at."""

from __future__ import annotations

from tensortrace.cli.render.line import Line

WIDTH = 79


class Status(Line):
    """Keeps the line, wipes it at the end; writes nothing but to a terminal."""

    def tell(self, text: str) -> None:
        """Show a text in the place of the one before; may be called often."""
        self.show(text[:WIDTH])
