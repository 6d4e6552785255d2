"""The line of a long comparison: on a terminal alone, after two seconds, wiped at the end."""

from __future__ import annotations

import io

import pytest

from tensortrace.cli.render import progress as module
from tensortrace.cli.render.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_long_comparison_says_how_much_is_done_and_how_long_the_rest_takes(clock: list[float]) -> None:
    terminal = Terminal()
    with Progress(terminal) as progress:
        clock[0] += 1
        progress.tell(0.1, 2)
        assert terminal.getvalue() == ""
        clock[0] += 29
        progress.tell(0.5, 2)
        assert "compared 25% of 2 steps, about 1 min 30 s left" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_nothing_is_written_to_a_pipe(clock: list[float]) -> None:
    pipe = io.StringIO()
    with Progress(pipe) as progress:
        clock[0] += 30
        progress.tell(1.0, 2)
    assert not progress.shown
    assert pipe.getvalue() == ""
