"""Records in memory what a program does that was asked to begin elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensortrace.tracer import hooks, start
from tensortrace.tracer.settings import Start
from tests.memory_sink import MemorySink


@contextmanager
def started(asked: Start, layout: Path | None = None) -> Iterator[MemorySink]:
    """Record the body in memory, begun as asked; an error of a hook fails the test.

    ``layout`` is the file that says what the program has spread by hand.
    """
    sink = MemorySink()
    installed = hooks.install(sink)
    try:
        start.install(installed, asked, layout=None if layout is None else str(layout))
        yield sink
        installed.finish()
    finally:
        installed.remove()
    if sink.failures:
        raise sink.failures[0][1]
