"""Tests of watching a trace that is being written."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tensortrace.tracer.progress import look
from tensortrace.tracer.types import Boundary, Kind, RankManifest
from tensortrace.tracer.writer import RankWriter


def boundary(event: int, step: int) -> Boundary:
    return Boundary(
        event=event, step=step, microbatch=0, kind=Kind.LOSS, name="mse", slot="value", dtype="uint8",
        local_shape=(3,),
    )  # fmt: skip


def test_nothing_there_yet_is_no_rank(tmp_path: Path) -> None:
    assert look(tmp_path / "missing") == ()
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert look(tmp_path) == ()


def test_the_last_boundary_is_seen_while_the_files_are_open_and_after(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 1) as writer:
        for step in range(4):
            writer.append(boundary(step, step), np.array([step, 1, 2], np.uint8))
        [while_open] = look(tmp_path)
        writer.write_manifest(RankManifest(format=1, rank=1, world_size=2, ended="finished"))
    [closed] = look(tmp_path)
    assert while_open.last is not None
    assert (while_open.folder, while_open.rank, while_open.last.step, while_open.ended) == (
        "rank00001", 1, 3, None,
    )  # fmt: skip
    assert (closed.last, closed.index_bytes) == (while_open.last, while_open.index_bytes)
    assert closed.ended == "finished"
    assert closed.size_bytes >= closed.index_bytes > 0


def test_a_line_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        writer.append(boundary(0, 0), np.zeros(3, np.uint8))
    index = tmp_path / "rank00000" / "index.jsonl"
    index.write_bytes(index.read_bytes() + b'{"event": 1')
    [rank] = look(tmp_path)
    assert rank.last is not None
    assert rank.last.event == 0


def test_ranks_come_in_order_with_their_attempts(tmp_path: Path) -> None:
    for name in ("rank00002", "rank00000.r1", "rank00000"):
        (tmp_path / name).mkdir()
    assert [(rank.rank, rank.attempt) for rank in look(tmp_path)] == [(0, 0), (0, 1), (2, 0)]
