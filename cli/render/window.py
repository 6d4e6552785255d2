"""What a trace says of the steps that it kept, of those that it didn't, and of what ended it."""

from __future__ import annotations

from collections.abc import Iterator

from tensortrace.cli.contents import Contents, RankRow
from tensortrace.cli.render.numbers import moment, ranks
from tensortrace.cli.render.safe import safe
from tensortrace.tracer.reader_window import said
from tensortrace.tracer.types import INIT_STEP, Promise, Window


def lines(contents: Contents) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of what ``--keep-last`` left; nothing of a trace that keeps all its steps."""
    rows = [(row, row.window) for row in contents.ranks if row.window is not None]
    if not rows:
        return
    for first in sorted({window.first for _, window in rows}):
        whose = [row.rank for row, window in rows if window.first == first]
        if first > INIT_STEP:
            yield "kept:", f"{_asked(contents.promise)}: steps 0-{first - 1} not kept ({ranks(whose)})"
        else:
            yield "kept:", f"{_asked(contents.promise)}: there were no more ({ranks(whose)})"
    if len(rows) > 1 and contents.common is not None:
        yield "common:", f"steps {contents.common[0]}-{contents.common[1]}" if contents.common else "no step"
    told = [(row, window) for row, window in rows if window.triggered is not None]
    yield from (_trigger(row, window) for row, window in told[:_SHOWN])
    if len(told) > _SHOWN:
        yield "triggered:", f"on {len(told) - _SHOWN} more ranks"
    if contents.promise.triggers and len(told) < len(contents.ranks):
        quiet = ranks({row.rank for row in contents.ranks} - {row.rank for row, _ in told})
        yield "triggered:", f"nothing on {quiet}: the last steps before the end"
    for note in sorted({note for _, window in rows for note in window.notes}):
        yield "note:", safe(note, limit=300)


_SHOWN = 16


def _asked(promise: Promise) -> str:
    return f"the last {promise.keep_last}" + (
        f" and {promise.after} after a trigger" if promise.after else ""
    )


def _trigger(row: RankRow, window: Window) -> tuple[str, str]:
    assert window.triggered is not None
    return (
        "triggered:",
        f"rank {row.rank}, {moment(window.triggered.at)}: {safe(said(window.triggered), limit=400)}",
    )
