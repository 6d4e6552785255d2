"""Watching a recording that hangs, of which then a rank is killed: what is told, and when it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tensortrace.tracer.watching import Snapshot, Watcher
from tests.faults.running import LIMIT_S, PROGRAMS, PYTHON, ranks_of, run, started, torchrun, wait_for_line

TRACE = str(Path(PYTHON).with_name("trace"))


def wait_until(watcher: Watcher, state: str) -> Snapshot:
    """Look until the recording is in a state."""
    deadline = time.monotonic() + LIMIT_S
    while (snapshot := watcher.look()).state != state:
        assert time.monotonic() < deadline, snapshot.state
        time.sleep(0.1)
    return snapshot


def test_a_hang_names_the_rank_that_is_behind_and_a_kill_ends_the_watching(tmp_path: Path) -> None:
    root = tmp_path / "a"
    with started(root, *torchrun(str(PROGRAMS / "hang.py"))) as child:
        wait_for_line(child)
        hung = wait_until(Watcher(root, stale_after_s=2), "stale")
        looked = run(TRACE, "watch", str(root), "--once", "--json", "--hang-after", "1")
        watching = subprocess.Popen(
            [TRACE, "watch", str(root), "--interval", "0.2"], stdout=subprocess.PIPE, text=True
        )
        os.kill(ranks_of(root)["rank00001"].pid, signal.SIGKILL)
        lines, _ = watching.communicate(timeout=LIMIT_S)
        child.communicate(timeout=LIMIT_S)
    assert [(rank.progress.rank, rank.behind) for rank in hung.ranks] == [(0, False), (1, True)]
    told = json.loads(looked.out)
    assert (looked.code, told["state"], told["over"]) == (0, "stale", False)
    last = told["ranks"][1]["last"]
    assert (last["step"], last["kind"], last["name"]) == (2, "loss", "mse_loss")
    assert watching.returncode == 0
    assert " killed: step 2 · " in lines.splitlines()[-1]


def test_an_interrupt_ends_the_watching_as_in_a_shell(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    with subprocess.Popen([TRACE, "watch", str(root)], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().endswith(" waiting: no rank has begun\n")
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=LIMIT_S)
    assert watching.returncode == 130
