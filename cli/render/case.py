"""A packed case as text: what was packed, and what came of replaying it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tensortrace.cli.render import replayed, text
from tensortrace.cli.render.finding import SENTENCE
from tensortrace.cli.render.numbers import counted, size
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import Result

if TYPE_CHECKING:
    from tensortrace.replay.packed import CaseReplay
    from tensortrace.replay.packing import PackedCase


def render(found: CaseReplay, *, look: Look, detail: text.Detail) -> str:
    """Return what the traces of a case say, and whether it is what the case states."""
    page = Page(look)
    if found:
        page.line(("as stated", "bold green"), ": the verdict, its place and its cause are those of the case")
    else:
        page.line(("NOT AS STATED", "bold red"), ": the traces of the case give another verdict")
        page.bullets([safe(line, limit=SENTENCE) for line in found.deviations], limit=None)
    outcome = found.outcome
    if isinstance(outcome, Result):
        return text.render(outcome, look=look, detail=detail) + page.text()
    return replayed.render(outcome, look=look, detail=detail) + page.text()


def hints(path: str) -> tuple[str, ...]:
    """Return what is said on stderr after a case was replayed."""
    quoted = shlex.quote(safe(path, limit=SENTENCE))
    return (f"next: unzip {quoted} -d case  # README.md, and its traces for `trace show` and `trace diff`",)


def packed(found: PackedCase, path: str) -> str:
    """Return what was packed, in two lines."""
    traces = found.case.traces
    held, recorded = (sum(getattr(t, name) for t in traces) for name in ("boundaries", "recorded"))
    tried = f", found in {counted(found.tried, 'try')}" if found.tried else ""
    return (
        f"{safe(path)}: {size(found.size_bytes)}, {held:,} of {counted(recorded, 'boundary')}"
        f"{tried}\nstates: {safe(found.case.expected.headline, limit=SENTENCE)}\n"
    )
