"""Recording reaches every trainer rank, however it is started, and no other process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.faults.running import PROGRAMS, PYTHON, TRAIN, plain, ranks_of, recorded, torchrun


def test_a_plain_python_is_rank_0_of_1_and_computes_the_same(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", *TRAIN)
    assert (ran.code, ran.out) == (0, plain(*TRAIN).out)
    assert ran.warnings == []
    [(folder, rank)] = ranks_of(tmp_path / "a").items()
    assert (folder, rank.rank, rank.world_size, rank.ended) == ("rank00000", 0, 1, "finished")
    assert rank.steps == 3
    assert ran.err.splitlines()[-1] == f"trace: next: trace show {tmp_path / 'a'}"


def test_python_dash_m_records(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", PYTHON, "-m", "train", "--steps", "1", cwd=PROGRAMS)
    assert ran.code == 0
    assert [rank.ended for rank in ranks_of(tmp_path / "a").values()] == ["finished"]


def test_torchrun_records_its_ranks_and_not_its_agent(tmp_path: Path) -> None:
    command = torchrun(TRAIN[1])
    ran = recorded(tmp_path / "a", *command)
    assert ran.code == 0, ran.err
    assert ran.digests == plain(*command).digests
    found = ranks_of(tmp_path / "a")
    assert [(name, rank.rank, rank.world_size) for name, rank in found.items()] == [
        ("rank00000", 0, 2),
        ("rank00001", 1, 2),
    ]
    assert {rank.ended for rank in found.values()} == {"finished"}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_multiprocessing_get_their_ranks_and_their_parent_gets_none(
    tmp_path: Path, method: str
) -> None:
    ran = recorded(tmp_path / "a", PYTHON, str(PROGRAMS / "spawn.py"), method, str(tmp_path / "meeting"))
    assert ran.code == 0, ran.err
    assert ran.warnings == []
    found = ranks_of(tmp_path / "a")
    assert [(name, rank.rank, rank.ended) for name, rank in found.items()] == [
        ("rank00000", 0, "finished"),
        ("rank00001", 1, "finished"),
    ]


def test_an_exception_in_a_spawned_rank_is_in_its_manifest(tmp_path: Path) -> None:
    program = str(PROGRAMS / "spawn.py")
    ran = recorded(tmp_path / "a", PYTHON, program, "spawn", str(tmp_path / "meeting"), "raise")
    assert ran.code == 1
    assert "ValueError: rank 1 fails" in ran.err
    assert ranks_of(tmp_path / "a")["rank00001"].ended == "exception: ValueError"


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_data_workers_stay_clean_even_if_they_run_modules(tmp_path: Path, method: str) -> None:
    ran = recorded(tmp_path / "a", PYTHON, str(PROGRAMS / "loader.py"), method)
    assert (ran.code, ran.out) == (0, "trained\n"), ran.err
    assert ran.warnings == []
    [rank] = ranks_of(tmp_path / "a").values()
    assert (rank.ended, rank.steps) == ("finished", 4)


def test_helper_processes_leave_no_folder(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", PYTHON, str(PROGRAMS / "helpers.py"))
    assert (ran.code, ran.out) == (0, "helper trained\ntrained\n"), ran.err
    [rank] = ranks_of(tmp_path / "a").values()
    assert (rank.ended, rank.steps) == ("finished", 2)
    [warning] = ran.warnings
    assert f"rank 0 is already recorded by process {rank.pid}" in warning


def test_two_programs_one_after_another_are_two_attempts(tmp_path: Path) -> None:
    twice = f"{PYTHON} {TRAIN[1]} --steps 1 && {PYTHON} {TRAIN[1]} --steps 2"
    assert recorded(tmp_path / "a", "/bin/sh", "-c", twice).code == 0
    found = ranks_of(tmp_path / "a")
    assert [(name, rank.attempt, rank.steps) for name, rank in found.items()] == [
        ("rank00000", 0, 1),
        ("rank00000.r1", 1, 2),
    ]


def test_an_elastic_restart_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    command = torchrun("--max-restarts", "1", str(PROGRAMS / "restart.py"), str(tmp_path / "meeting"))
    ran = recorded(tmp_path / "a", *command)
    assert ran.code == 0, ran.err
    found = ranks_of(tmp_path / "a")
    assert found["rank00001"].ended == "exception: RuntimeError"
    assert [found[f"rank0000{rank}.r1"].ended for rank in (0, 1)] == ["finished", "finished"]


def test_a_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    ran = recorded(tmp_path / "a", *TRAIN, "--steps", "1", env={"PYTHONPATH": str(tmp_path)})
    assert ran.out.splitlines()[0] == "theirs"
    assert len(ranks_of(tmp_path / "a")) == 1


def test_a_command_that_trains_nothing_is_trouble_only_if_it_succeeded(tmp_path: Path) -> None:
    idle = recorded(tmp_path / "a", PYTHON, "-c", "print('hello')")
    assert (idle.code, idle.out) == (2, "hello\n")
    assert "nothing was recorded" in idle.err
    failed = recorded(tmp_path / "b", PYTHON, "-c", "raise SystemExit(9)")
    assert failed.code == 9
    assert "nothing was recorded" in failed.err


def test_a_python_that_ignores_pythonpath_is_named_as_a_reason(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", PYTHON, "-I", TRAIN[1], "--steps", "1")
    assert ran.code == 2
    assert "-I" in ran.err


def test_standard_input_reaches_the_command(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", "/bin/sh", "-c", f"echo text | {sys.executable} -c 'print(input())'")
    assert ran.out == "text\n"
