"""Records in memory what a program does that was asked to begin elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from tensortrace.tracer import start
from tensortrace.tracer.settings import Start
from tests.memory_sink import MemorySink, recording_into


def started(asked: Start, layout: Path | None = None) -> AbstractContextManager[MemorySink]:
    """Record the body in memory, begun as asked; an error of a hook fails the test.

    ``layout`` is the file that says what the program has spread by hand.
    """
    path = None if layout is None else str(layout)
    return recording_into(MemorySink(), begin=lambda hooks: start.install(hooks, asked, layout=path))
