"""Tests of what ``trace record`` shows while it runs and when it has ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tensortrace.cli.render.live import Live, ending, hang_table, progress_line
from tensortrace.tracer.launch import Outcome
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.types import Entry, Kind


def rank(
    number: int, *, step: int | None = 3, ended: str | None = None, size: int = 1_500_000, index: int = 100
) -> RankProgress:
    last = None
    if step is not None:
        last = Entry(
            event=0, step=step, microbatch=1, kind=Kind.ACTIVATION, name="h.0", slot="out", dtype="float32",
            local_shape=(), digest="00",
        )  # fmt: skip
    return RankProgress(
        folder=f"rank{number:05d}", rank=number, attempt=0, size_bytes=size, index_bytes=index, last=last,
        ended=ended,
    )  # fmt: skip


def test_the_line_of_progress_has_step_size_and_ranks() -> None:
    assert progress_line((rank(0), rank(1))) == "trace: step 3 · 3.0 MB · 2 ranks"


def test_ranks_that_are_apart_show_as_a_range() -> None:
    assert progress_line((rank(0, step=-1), rank(1, step=2))) == "trace: step init-2 · 3.0 MB · 2 ranks"


def test_before_the_first_boundary_it_says_what_it_waits_for() -> None:
    assert progress_line(()) == "trace: waiting for the first boundary"


def test_a_hang_lists_the_last_boundary_of_each_rank() -> None:
    table = hang_table((rank(0), rank(1, step=None), rank(2, ended="finished")), 60.4)
    assert table == [
        "trace: no rank has reached a new boundary for 60 s; the last of each:",
        "  rank00000  step 3 microbatch 1 activation h.0 out",
        "  rank00001  no boundary",
        "  rank00002  step 3 microbatch 1 activation h.0 out  (finished)",
    ]


def test_a_hang_is_shown_once_until_something_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    live = Live(hang_after_s=10)
    for second, index in ((1, 100), (5, 100), (11, 100), (15, 100), (16, 200), (20, 200), (27, 200)):
        now = float(second)
        live.show((rank(0, index=index),))
        shown = capsys.readouterr().err.count("no rank has reached")
        assert shown == (1 if second in (11, 27) else 0), f"at {second} s"


def test_hang_after_zero_never_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    live = Live(hang_after_s=0)
    for second in (1, 10_000):
        now = float(second)
        live.show((rank(0),))
    assert "no rank has reached" not in capsys.readouterr().err


def test_the_end_names_the_ranks_that_did_not_finish_and_the_next_command() -> None:
    outcome = Outcome(1, (rank(0, ended="finished"), rank(1, ended="failed: writing: full"), rank(2)))
    assert ending(outcome, Path("a")) == [
        "trace: recorded 3 ranks up to step 3, 4.5 MB in a",
        "trace: warning: rank00001 failed: writing: full; last: step 3 microbatch 1 activation h.0 out",
        "trace: warning: rank00002 was killed; last: step 3 microbatch 1 activation h.0 out",
        "trace: next: trace show a",
    ]


def test_the_end_of_a_recording_of_nothing_says_what_a_trainer_needs() -> None:
    lines = ending(Outcome(0, ()), Path("a"))
    assert "nothing was recorded" in lines[0]
    assert "PYTHONPATH" in lines[1]
