"""Whatever goes wrong in the recorder, the training computes the same bits and ends the same way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensortrace.tracer.hooks import guard
from tensortrace.tracer.reader import Trace
from tests.faults.running import PROGRAMS, TRAIN, Ran, plain, ranks_of, recorded, run, torchrun


@pytest.fixture(scope="module")
def every_hook(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    root = tmp_path_factory.mktemp("every_hook")
    return root, run(*torchrun(str(PROGRAMS / "every_hook.py"), str(root)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system is not permitted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_error_in_any_hook_leaves_the_training_bitwise_the_same(every_hook: tuple[Path, Ran]) -> None:
    _, ran = every_hook
    assert ran.code == 0, ran.err
    told = [json.loads(line) for line in ran.out.splitlines() if line.startswith("{")]
    assert {one["hook"] for one in told} == {"none", *guard.GUARDED}
    assert len(told) == 2 * (1 + len(guard.GUARDED))
    assert [one for one in told if not one["same"]] == []


def test_an_error_in_any_hook_ends_that_ranks_recording_and_no_other(every_hook: tuple[Path, Ran]) -> None:
    root, ran = every_hook
    assert ran.code == 0, ran.err
    unreached = set()
    for name in guard.GUARDED:
        ranks = ranks_of(root / name.replace("/", "_"))
        assert ranks["rank00000"].ended == "finished"
        ended = ranks["rank00001"].ended if "rank00001" in ranks else "never opened"
        if ended == "finished":
            unreached.add(name)
        else:
            assert ended in (f"failed: {name}: InjectedFault: {name}", "never opened")
    assert unreached == set(), "train.py must take every path"
    assert len(ran.warnings) == len(guard.GUARDED) - len(unreached), "one warning for each failure"


@pytest.mark.parametrize("strict", [False, True])
def test_strict_turns_an_error_of_ours_into_one_of_the_program(tmp_path: Path, strict: bool) -> None:
    hook = sorted(guard.GUARDED)[0]
    env = {"TENSORTRACE_FAULT": f"hook:{hook}"}
    ran = recorded(tmp_path / "a", *TRAIN, options=("--strict",) if strict else (), env=env)
    assert ran.code == (1 if strict else 0)
    assert ("Traceback" in ran.err) == strict


def test_what_was_recorded_before_a_failure_is_written_before_the_program_ends(tmp_path: Path) -> None:
    """Else the writer's thread dies inside C++ code while the interpreter shuts down, and aborts it."""
    env = {"TENSORTRACE_FAULT": "hook:optimizer step: after,slow:0.05"}
    ran = recorded(tmp_path / "a", *TRAIN, options=("--strict",), env=env)
    assert ran.code == 1, ran.err
    rank = ranks_of(tmp_path / "a")["rank00000"]
    assert (rank.ended or "").startswith("failed: optimizer step: after: InjectedFault")
    with Trace.open(tmp_path / "a") as trace:
        assert len(trace.ranks[0].entries) == rank.boundaries > 10


def test_a_full_disk_ends_the_recording_only(small_disk: Path) -> None:
    ran = recorded(small_disk / "a", *torchrun(TRAIN[1]))
    assert ran.code == 0, ran.err
    assert ran.digests == plain(*torchrun(TRAIN[1])).digests
    assert len(ran.warnings) == 2, "one a rank"
    assert all("No space left on device" in warning for warning in ran.warnings)


def test_a_disk_that_fills_on_one_rank_leaves_the_other_recording(tmp_path: Path) -> None:
    root = tmp_path / "a"
    ran = recorded(root, *torchrun(str(PROGRAMS / "fault_on_rank_1.py"), "full:60", TRAIN[1]))
    assert ran.code == 0, ran.err
    assert ran.digests == plain(*torchrun(TRAIN[1])).digests
    assert [warning.split(":")[1] for warning in ran.warnings] == [" rank 1"]
    found = ranks_of(root)
    assert found["rank00000"].ended == "finished"
    assert (found["rank00001"].ended or "").startswith("failed: writing: OSError: [Errno 28]")
    with Trace.open(root) as trace:
        assert [len(rank.entries) for rank in trace.ranks if rank.rank == 1] == [59]


def test_an_output_that_cannot_be_written_ends_the_recording_only(tmp_path: Path) -> None:
    root = tmp_path / "a"
    program = " ".join(TRAIN)
    ran = recorded(root, "/bin/sh", "-c", f"rm -r {root} && touch {root} && {program}")
    assert ran.code == 2, "nothing was recorded, and the command succeeded"
    assert ran.digests == plain(*TRAIN).digests
    assert len(ran.warnings) == 1
    assert "opening the trace: NotADirectoryError" in ran.warnings[0]


@pytest.mark.parametrize("policy", ["block", "drop"])
def test_a_slow_writer_waits_or_drops_as_asked(tmp_path: Path, policy: str) -> None:
    root = tmp_path / "a"
    options = ("--buffer", "16KiB", "--on-pressure", policy)
    ran = recorded(root, *TRAIN, options=options, env={"TENSORTRACE_FAULT": "slow:0.005"})
    assert (ran.code, ran.out) == (0, plain(*TRAIN).out)
    rank = ranks_of(root)["rank00000"]
    assert rank.ended == "finished"
    if policy == "block":
        assert rank.drops.count == 0
    else:
        assert rank.drops.count > 0
        assert rank.drops.reasons == {"buffer_full": rank.drops.count}
    with Trace.open(root) as trace:
        assert len(trace.ranks[0].entries) == rank.boundaries


def test_max_bytes_stops_the_writing_and_says_so(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", *TRAIN, options=("--max-bytes", "8KiB"))
    assert (ran.code, ran.out) == (0, plain(*TRAIN).out)
    rank = ranks_of(tmp_path / "a")["rank00000"]
    assert rank.drops.reasons == {"max_bytes": rank.drops.count}
    assert len(ran.warnings) == 1


def test_min_free_leaves_the_disk_to_the_training(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", *TRAIN, options=("--min-free", "1000T"))
    assert (ran.code, ran.out) == (0, plain(*TRAIN).out)
    rank = ranks_of(tmp_path / "a")["rank00000"]
    assert rank.boundaries == 0
    assert rank.drops.reasons == {"min_free": rank.drops.count}


def test_a_dry_run_writes_nothing_and_lets_the_program_finish(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", *TRAIN, options=("--dry-run",))
    assert (ran.code, ran.out) == (0, plain(*TRAIN).out)
    assert not (tmp_path / "a").exists()
    assert "dry run: " in ran.err
    assert "reduced_grad: absent" in ran.err
    assert "recording is off from here" in ran.err
