"""Tests of what the files of a recording tell of how it gets on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer import layout, progress, watching
from tensortrace.tracer.manifest import finish_manifest, write_manifest_new
from tensortrace.tracer.progress import behind, look
from tensortrace.tracer.types import Boundary, Drops, Kind, Manifest, RankManifest
from tensortrace.tracer.watching import Watcher
from tensortrace.tracer.writer import RankWriter


def append(writer: RankWriter, event: int, step: int, name: str = "h.0") -> None:
    made = Boundary(
        event=event, step=step, microbatch=0, kind=Kind.ACTIVATION, name=name, slot="out", dtype="uint8",
        local_shape=(3,),
    )  # fmt: skip
    writer.append(made, np.zeros(3, np.uint8))


def say(
    writer: RankWriter, rank: int, *, pid: int, ended: str | None = None, host: str | None = None
) -> None:
    told = RankManifest(
        format=1, rank=rank, world_size=2, pid=pid, host=host or socket.gethostname(), ended=ended,
        drops=Drops(7, 70, {"buffer_full": 7}),
    )  # fmt: skip
    writer.write_manifest(told)


def begun(root: Path) -> Manifest:
    root.mkdir(exist_ok=True)
    manifest = Manifest(format=1, run_id="x", command=("python",), started_at=1.0)
    write_manifest_new(root / layout.MANIFEST, manifest)
    return manifest


@pytest.fixture(scope="module")
def gone() -> int:
    """A number that was a process's, which has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_before_a_rank_begins_the_recording_waits(tmp_path: Path) -> None:
    begun(tmp_path)
    snapshot = Watcher(tmp_path, stale_after_s=60).look()
    assert (snapshot.state, snapshot.over, snapshot.ranks) == ("waiting", False, ())


def test_a_rank_whose_process_runs_is_running_and_one_whose_process_is_gone_was_killed(
    tmp_path: Path, gone: int
) -> None:
    begun(tmp_path)
    for rank, pid in ((0, os.getpid()), (1, gone)):
        with RankWriter(tmp_path, rank) as writer:
            append(writer, 0, 0)
            say(writer, rank, pid=pid)
    snapshot = Watcher(tmp_path, stale_after_s=60).look()
    assert [rank.state for rank in snapshot.ranks] == ["running", "killed"]
    assert (snapshot.state, snapshot.over) == ("running", False)
    assert [rank.progress.dropped for rank in snapshot.ranks] == [7, 7]


def test_of_a_process_on_another_machine_nothing_is_claimed(tmp_path: Path, gone: int) -> None:
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0, 0)
        say(writer, 0, pid=gone, host="elsewhere")
    assert Watcher(tmp_path, stale_after_s=60).look().ranks[0].state == "running"


@pytest.mark.parametrize(
    ("ended", "code", "state"),
    [("finished", 0, "finished"), ("finished", 3, "failed"), ("exception: ValueError", 1, "failed")],
)
def test_the_launcher_says_when_it_is_over(tmp_path: Path, ended: str, code: int, state: str) -> None:
    manifest = begun(tmp_path)
    watcher = Watcher(tmp_path, stale_after_s=60)
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0, 0)
        say(writer, 0, pid=os.getpid(), ended=ended)
    assert (watcher.look().state, watcher.look().over) == ("running", False)
    finished = {"exit_code": code, "ended_at": 2.0, "ranks": ("rank00000",)}
    finish_manifest(tmp_path / layout.MANIFEST, Manifest(**(_fields(manifest) | finished)))  # type: ignore[arg-type]
    snapshot = watcher.look()
    assert (snapshot.state, snapshot.over, snapshot.exit_code) == (state, True, code)


def _fields(manifest: Manifest) -> dict[str, object]:
    return {name: getattr(manifest, name) for name in ("format", "run_id", "command", "started_at")}


def test_a_recording_whose_launcher_was_killed_too_ends_after_a_while(
    tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0, 0)
        say(writer, 0, pid=gone)
    watcher = Watcher(tmp_path, stale_after_s=60)
    assert not watcher.look().over
    monkeypatch.setattr(watching, "GRACE_S", 0.0)
    snapshot = watcher.look()
    assert (snapshot.state, snapshot.over) == ("killed", True)


def test_a_restarted_rank_counts_by_its_last_attempt(tmp_path: Path, gone: int) -> None:
    manifest = begun(tmp_path)
    for attempt, ended in ((0, None), (1, "finished")):
        with RankWriter(tmp_path, 0, attempt=attempt) as writer:
            append(writer, 0, 0)
            say(writer, 0, pid=gone, ended=ended)
    finished = {"exit_code": 0, "ended_at": 2.0, "ranks": ("rank00000", "rank00000.r1")}
    finish_manifest(tmp_path / layout.MANIFEST, Manifest(**(_fields(manifest) | finished)))  # type: ignore[arg-type]
    assert Watcher(tmp_path, stale_after_s=60).look().state == "finished"


@pytest.mark.parametrize(
    ("first", "second", "late"),
    [
        ([(0, "a"), (0, "b")], [(0, "a"), (0, "b"), (1, "a")], ["rank00000"]),  # a step behind
        ([(0, "a"), (0, "b"), (0, "c")], [(0, "a"), (0, "b")], ["rank00001"]),  # in one step: 0 has passed b
        ([(0, "a"), (0, "b")], [(0, "a"), (0, "b")], []),  # both at b
        ([(0, "a"), (0, "b")], [(0, "x"), (0, "y"), (0, "z")], []),  # stages of a pipeline
        ([], [(0, "a")], ["rank00000"]),
    ],
)
def test_who_is_behind_is_told_by_what_others_have_passed(
    tmp_path: Path, first: list[tuple[int, str]], second: list[tuple[int, str]], late: list[str]
) -> None:
    for rank, boundaries in enumerate((first, second)):
        with RankWriter(tmp_path, rank) as writer:
            for event, (step, name) in enumerate(boundaries):
                append(writer, event, step, name)
    assert sorted(behind(tmp_path, look(tmp_path))) == late


def test_the_rate_is_what_was_written_between_two_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([100.0, 104.0])
    monkeypatch.setattr(watching.time, "monotonic", lambda: next(seconds))
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0, 0)
        say(writer, 0, pid=os.getpid())
        watcher = Watcher(tmp_path, stale_after_s=0)
        [first] = watcher.look().ranks
        (tmp_path / "rank00000" / "more").write_bytes(b"x" * 4000)
        [second] = watcher.look().ranks
    assert (first.rate_bytes_s, second.rate_bytes_s) == (None, 1000.0)


def test_files_that_would_block_or_never_end_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "rank00000"
    folder.mkdir()
    os.mkfifo(folder / "index.jsonl")
    (folder / "rank.json").symlink_to("/dev/zero")
    (tmp_path / "rank00001").mkdir()
    (tmp_path / "rank00001" / "rank.json").write_text('{"pid": "x"}')
    snapshot = Watcher(tmp_path, stale_after_s=1).look()
    assert [(rank.progress.last, rank.state) for rank in snapshot.ranks] == [(None, "running")] * 2
    assert json.loads(snapshot.to_json())["schema"] == "tensortrace.watch/1"


def test_what_is_read_does_not_grow_with_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0, 0)
    index = tmp_path / "rank00000" / "index.jsonl"
    index.write_bytes(index.read_bytes() * 5000)
    asked: list[int] = []

    def read(descriptor: int, offset: int, size: int, path: Path) -> bytes:
        asked.append(size)
        return os.pread(descriptor, size, offset)

    monkeypatch.setattr(progress, "read_at", read)
    [rank] = look(tmp_path)
    assert rank.index_bytes > 1_000_000
    assert rank.last is not None
    assert asked == [64 << 10]
