"""What ``trace watch`` shows, from hand-made moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.cli import main
from tensortrace.cli.render.page import Look
from tensortrace.cli.render.watched import ROWS, line, render
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.types import Entry, Kind
from tensortrace.tracer.watching import Snapshot, WatchedRank


def rank(number: int, *, behind: bool = False, ended: str | None = None, name: str = "h.0") -> WatchedRank:
    last = Entry(
        event=0, step=3, microbatch=1, kind=Kind.ACTIVATION, name=name, slot="out", dtype="float32",
        local_shape=(), digest="00",
    )  # fmt: skip
    at = RankProgress(f"rank{number:05d}", number, 0, 1_500_000, 100, last, ended)
    return WatchedRank(at, "ended" if ended else "running", 75.0, 2_500_000.0, behind)


def test_a_line_tells_state_steps_speed_and_who_is_waited_for() -> None:
    moment = Snapshot("stale", False, 75.0, None, (rank(0), rank(1, behind=True)))
    assert line(moment) == (
        "stale: step 3 · 3.0 MB · 2 ranks · 5.0 MB/s · last boundary 1 min 15 s ago · "
        "rank 1 is behind: the others may wait for it"
    )


def test_a_table_has_a_row_for_each_rank_without_empty_columns() -> None:
    text = render(Snapshot("stale", False, 75.0, None, (rank(0), rank(1, behind=True))), look=Look())
    assert text.splitlines() == [
        "STALE: step 3 · 3.0 MB · 2 ranks · 5.0 MB/s · last boundary 1 min 15 s ago",
        "  rank                    MB  MB/s        idle  last boundary",
        "     0  running          1.5   2.5  1 min 15 s  step 3 microbatch 1 activation",
        "                                                h.0 out",
        "     1  running, behind  1.5   2.5  1 min 15 s  step 3 microbatch 1 activation",
        "                                                h.0 out",
        "rank 1 is behind: the others may wait for it",
    ]


def test_of_many_ranks_those_that_matter_are_shown() -> None:
    many = [rank(n, ended="finished") for n in range(ROWS + 10)]
    many[-1], many[-2] = rank(ROWS + 9, behind=True), rank(ROWS + 8, ended="failed: disk full")
    text = render(Snapshot("stale", False, 75.0, None, tuple(many)), look=Look())
    assert "running, behind" in text
    assert "failed: disk full" in text
    assert "10 more ranks: nothing of note" in text


def test_hostile_names_do_not_drive_the_terminal() -> None:
    moment = Snapshot(
        "running", False, 1.0, None, (rank(0, name="\x1b]0;owned\x07\n"), rank(1, ended="\x1b[2J"))
    )
    assert "\x1b" not in render(moment, look=Look()) + line(moment)


def test_a_folder_that_is_not_there_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["watch", str(tmp_path / "none")]) == 2
    assert "no such folder; start `trace record` first" in capsys.readouterr().err
