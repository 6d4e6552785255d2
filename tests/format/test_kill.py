"""SIGKILL of a writing process: every finished boundary reads back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.reader import Trace

WRITER = """
import sys
from pathlib import Path
import numpy as np
from tensortrace.tracer.types import Boundary, Kind
from tensortrace.tracer.writer import RankWriter

writer = RankWriter(Path(sys.argv[1]), 0)
for event in range(1_000_000):
    array = np.random.default_rng(event).standard_normal(SIZES[event % len(SIZES)]).astype("<f4")
    boundary = Boundary(event=event, step=event // 50, microbatch=0, kind=Kind.PARAM, name=f"p.{event}",
                        slot="model", dtype="float32", local_shape=array.shape)
    writer.append(boundary, array)
    print(event, flush=True)
    if event % 50 == 49:
        writer.end_step()
"""
SIZES = (1, 70, 5000, 3, 300_000, 800)


def killed_after(root: Path, boundaries: int) -> int:
    """Let a process write, kill it when so many boundaries are finished; return the last it finished."""
    script = WRITER.replace("SIZES[", f"{SIZES}[").replace("len(SIZES)", str(len(SIZES)))
    process = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(boundaries):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().splitlines(keepends=True)  # finished between our reading and the kill
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return boundaries + sum(line.endswith(b"\n") for line in rest)


@pytest.mark.parametrize("boundaries", [1, 2, 5, 23, 60, 151])
@pytest.mark.parametrize("with_index", [True, False])
def test_every_finished_boundary_survives(tmp_path: Path, boundaries: int, with_index: bool) -> None:
    finished = killed_after(tmp_path, boundaries)
    if not with_index:
        (tmp_path / "rank00000" / "index.jsonl.part").unlink()
    rank = Trace.open(tmp_path).ranks[0]
    assert [entry.event for entry in rank.entries[:finished]] == list(range(finished))
    assert len(rank.entries) <= finished + 1  # one may be finished but not yet reported
    for entry in rank.entries:
        size = SIZES[entry.event % len(SIZES)]
        expected = np.random.default_rng(entry.event).standard_normal(size).astype("<f4")
        np.testing.assert_array_equal(rank.read(entry), expected)
