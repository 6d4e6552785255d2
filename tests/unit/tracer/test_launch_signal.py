"""Whom ``trace record`` hands a signal that is a trigger."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tensortrace.tracer.flight_signal import Listener
from tensortrace.tracer.launch_signal import signal_ranks
from tensortrace.tracer.types import Promise
from tests.synthetic import write_trace


def trace_of(root: Path, pid: int, **fields: object) -> Path:
    """Write a trace whose only rank is said to be a process."""
    own = {"pid": pid, "host": socket.gethostname(), "ended": None, "promise": Promise(keep_last=1)}
    return write_trace(root, [[]], **(own | fields))  # type: ignore[arg-type]


def test_a_rank_that_listens_gets_it_and_the_programs_handler_too(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    listener = Listener(lambda: 41)
    try:
        assert listener.install() is None
        signal_ranks(trace_of(tmp_path, os.getpid()))
        assert listener.asked is not None
        assert (listener.asked.trigger, listener.asked.step) == ("SIGUSR1", 41)
        assert heard == [signal.SIGUSR1]
        assert listener.replaced() is None
        listener.remove()
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("fields", [{"host": "elsewhere"}, {"ended": "finished"}])
def test_ranks_elsewhere_and_those_that_have_ended_get_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fields: dict[str, object]
) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: pytest.fail("it was sent"))
    try:
        signal_ranks(trace_of(tmp_path, os.getpid(), **fields))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "no rank on this machine listens for it" in capfd.readouterr().err


def test_a_process_without_a_handler_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The signal would end it: here it would end the tests."""
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signal_ranks(trace_of(tmp_path, os.getpid()))
    signal_ranks(tmp_path / "a dry run has no folder")
    assert capfd.readouterr().err.count("no rank on this machine listens") == 2
