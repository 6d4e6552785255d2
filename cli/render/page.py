"""Lines of a terminal page: wrapping, indentation, columns, colour; for a terminal or a log file."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 80


class Look(NamedTuple):
    """How a page is drawn: width in cells, whether in ANSI colours, whether characters beyond ASCII show."""

    width: int = WIDTH
    color: bool = False
    unicode: bool = True


def look_of(stream: TextIO) -> Look:
    """Return how to draw for this stream: NO_COLOR wins, then FORCE_COLOR, then whether it is a terminal.

    A page is at most 80 cells wide, so that what is pasted or logged looks the same everywhere.
    """
    terminal = stream.isatty()
    width = max(min(WIDTH, shutil.get_terminal_size().columns) if terminal else WIDTH, 40)
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("_", "-")
    unicode = encoding in ("utf-8", "utf8", "utf-16", "utf-32")
    able = terminal and os.environ.get("TERM") != "dumb"
    color = not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or able)
    return Look(width, color, unicode)


class Page:
    """Collects lines; owns one rich console that draws them into a string.

    Texts are taken literally (no markup); pass what comes from a trace through ``safe`` first.
    """

    def __init__(self, look: Look) -> None:
        self.look = look
        self._out = io.StringIO()
        self._console = Console(
            file=self._out, width=look.width, force_terminal=look.color, no_color=not look.color,
            color_system="standard" if look.color else None, markup=False, emoji=False, highlight=False,
            legacy_windows=False, _environ={},
        )  # fmt: skip

    def line(self, *spans: str | tuple[str, str], indent: int = 0, hang: int = 2) -> None:
        """Add a paragraph of (text, style) spans; lines after the first are indented ``hang`` further."""
        text = Text.assemble(*spans)
        room = self.look.width - indent
        if text.cell_len <= room:
            self._put(text, indent)
            return
        for number, piece in enumerate(text.wrap(self._console, room - hang)):
            self._put(piece, indent + (hang if number else 0))

    def blank(self) -> None:
        """Add an empty line."""
        self._console.print()

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> None:
        """Add columns under a header, indented by two; titles listed in ``right`` are set flush right.

        A cell that does not fit is folded, never cut, so that names stay whole.
        """
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
        for title in header:
            flush = title in right.split(",")
            table.add_column(title, justify="right" if flush else "left", overflow="fold", no_wrap=flush)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        with self._console.capture() as drawn:
            self._console.print(table, width=self.look.width - 2)
        for drawn_line in drawn.get().splitlines():
            self._out.write("  " + drawn_line.rstrip() + "\n")

    def bullets(self, lines: Sequence[str], *, limit: int | None, indent: int = 2) -> None:
        """Add up to ``limit`` lines as a list, and say how many are left out."""
        for line in lines[:limit]:
            self.line(f"- {line}", indent=indent)
        self.more(len(lines) - len(lines[:limit]), indent=indent)

    def more(self, count: int, *, indent: int = 2) -> None:
        """Say that ``count`` more of what stands above were left out, if any were."""
        if count > 0:
            self.line((f"… {count:,} more with -v or in --json", "dim"), indent=indent)

    def text(self) -> str:
        """Return the page, one newline at its end, no spaces at the ends of lines."""
        lines = [line.rstrip() for line in self._out.getvalue().splitlines()]
        return "\n".join(lines) + "\n"

    def _put(self, text: Text, indent: int) -> None:
        text.rstrip()
        self._console.print(Text(" " * indent) + text, soft_wrap=True)
