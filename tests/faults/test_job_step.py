"""Tasks of a Slurm step, each under its own ``trace record``, leave one trace; started as by ``srun``."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tensortrace.cli import main
from tensortrace.tracer import job_step, launch
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.layout import MANIFEST
from tensortrace.tracer.manifest import read_manifest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.settings import Settings
from tests.faults.running import LIMIT_S, TRAIN, environment, record_command

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
PYTHON = ("python3", "-c", "")


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def test_two_tasks_leave_one_trace_of_two_ranks(tmp_path: Path) -> None:
    root, port = tmp_path / "a", free_port()
    tasks = [
        subprocess.Popen(
            record_command(root, *TRAIN, "--steps", "1"),
            env=environment(
                STEP
                | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [task.communicate(timeout=LIMIT_S)[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    with Trace.open(root) as trace:
        assert [rank.rank for rank in trace.ranks] == [0, 1]
        assert trace.problems == ()
    assert read_manifest(root / MANIFEST).exit_code == 0
    assert sum("trace: recorded " in text for text in said) == 1  # one speaks for all


def begin(root: Path, environ: dict[str, str]) -> launch.Outcome:
    return launch.run(PYTHON, Settings(root=str(root)), environ=environ, observe=lambda ranks: None)


def test_a_trace_that_has_ended_or_is_of_another_step_is_not_joined(tmp_path: Path) -> None:
    first = begin(tmp_path / "a", STEP)
    assert not first.joined
    with pytest.raises(BadRequest, match="exists"):
        begin(tmp_path / "a", STEP)
    launch.begin_trace(tmp_path / "b", PYTHON, Settings(root=""), {}, run_id=job_step.shared_run(STEP))
    assert begin(tmp_path / "b", STEP).joined
    for other in ({"SLURM_STEP_ID": "1"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_RESTART_COUNT": "1"}):
        with pytest.raises(BadRequest, match="exists"):
            begin(tmp_path / "b", STEP | other)


@pytest.mark.parametrize("missing", [*STEP, "all"])
def test_a_task_that_is_alone_shares_no_run(missing: str) -> None:
    environ = {name: value for name, value in STEP.items() if name != missing and missing != "all"}
    assert job_step.shared_run(environ) is None


def test_no_task_removes_what_another_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert main.run(["record", "--force", "-o", str(tmp_path / "a"), "--", *PYTHON]) == 2
    assert "name it by the job" in capsys.readouterr().err
