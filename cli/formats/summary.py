"""What every machine-readable face of a result is made of, whichever command made the result.

One file beside this for each kind of result fills it in, one for each format draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["passed", "failed", "skipped", "error"]
Level = Literal["error", "warning", "notice"]


@dataclass(frozen=True)
class Table:
    """Rows under a header, all of its length; ``left_out`` counts the rows that are not there."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


@dataclass(frozen=True)
class Section:
    """Sentences, or a table, under a title; without a title it belongs to the headline."""

    title: str
    lines: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Check:
    """One thing that was asked for: of a comparison a kind of boundary, of a validation a cell.

    ``skipped`` is what could not be judged by itself, ``error`` what says nothing of the program. ``details``
    are lines that were made safe.
    """

    name: str
    state: State
    message: str = ""
    details: str = ""


@dataclass(frozen=True)
class Notice:
    """What is said at a place of the program: ``source`` is ``train.py:12``, None where there is none."""

    level: Level
    title: str
    lines: tuple[str, ...]
    source: str | None = None


@dataclass(frozen=True)
class Summary:
    """A result, ready to be drawn. No string has been made safe yet, but for ``text`` and details.

    ``subject`` is what was looked at (``runs/a against runs/b``), ``headline`` begins with the verdict or
    not, ``text`` is what a terminal shows, ``commands`` are what to run next.
    """

    tool: str
    subject: str
    verdict: str
    holds: bool
    headline: str
    sections: tuple[Section, ...]
    checks: tuple[Check, ...]
    notices: tuple[Notice, ...]
    commands: tuple[str, ...]
    text: str

    @property
    def rest(self) -> str:
        """The headline behind the verdict, with what joins the two."""
        if self.headline.lower().startswith(self.verdict):
            return self.headline[len(self.verdict) :]
        return f": {self.headline}"
