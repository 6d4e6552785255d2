"""However a recorded program ends, it ends as it would without us, and its trace says how."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tensortrace.tracer.reader import Trace
from tests.faults.running import (
    LIMIT_S,
    PYTHON,
    TRAIN,
    plain,
    ranks_of,
    recorded,
    started,
    torchrun,
    wait_for_line,
)


def test_an_exception_keeps_its_traceback_and_its_code(tmp_path: Path) -> None:
    command = (*TRAIN, "--end", "raise")
    ran, alone = recorded(tmp_path / "a", *command), plain(*command)
    assert ran.code == alone.code == 1
    ours = [line for line in ran.err.splitlines() if not line.startswith("trace: ")]
    assert ours == alone.err.splitlines()
    assert ranks_of(tmp_path / "a")["rank00000"].ended == "exception: ValueError"


def test_os_exit_closes_the_trace_first(tmp_path: Path) -> None:
    command = (*TRAIN, "--end", "os_exit")
    ran = recorded(tmp_path / "a", *command)
    assert (ran.code, ran.out) == (5, plain(*command).out)
    rank = ranks_of(tmp_path / "a")["rank00000"]
    assert (rank.ended, rank.steps) == ("finished", 3)


def test_sys_exit_with_a_code_is_an_ordinary_end(tmp_path: Path) -> None:
    run_it = f"runpy.run_path({TRAIN[1]!r}, run_name='__main__')"
    program = f"import runpy, sys; sys.argv = ['t', '--steps', '1']; {run_it}; sys.exit(3)"
    assert recorded(tmp_path / "a", PYTHON, "-c", program).code == 3
    assert ranks_of(tmp_path / "a")["rank00000"].ended == "finished"


def test_a_killed_rank_leaves_all_that_was_finished(tmp_path: Path) -> None:
    """Rank 1 gets SIGKILL in the middle; what its index holds reads back, every digest checked."""
    root = tmp_path / "a"
    with started(root, *torchrun(TRAIN[1], "--steps", "100000", "--say")) as child:
        wait_for_line(child, count=12)
        os.kill(ranks_of(root)["rank00001"].pid, signal.SIGKILL)
        _, err = child.communicate(timeout=LIMIT_S)
        assert child.returncode == 1
    assert "rank00001 was killed" in err
    with Trace.open(root) as trace:
        rank = next(rank for rank in trace.ranks if rank.rank == 1)
        assert any("rank00001" in problem for problem in trace.problems)
        assert len(rank.entries) > 200
        for entry in rank.entries:
            rank.read(entry)


def test_a_signal_ends_the_program_as_it_would_alone(tmp_path: Path) -> None:
    with started(tmp_path / "a", *TRAIN, "--steps", "100000", "--say") as child:
        wait_for_line(child)
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=LIMIT_S)
        assert child.returncode == 128 + signal.SIGTERM
    assert "was killed" in err


def test_an_interrupt_is_noted_as_the_exception_that_python_makes_of_it(tmp_path: Path) -> None:
    with started(tmp_path / "a", *TRAIN, "--steps", "100000", "--say") as child:
        wait_for_line(child)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=LIMIT_S)
        assert child.returncode == 128 + signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert ranks_of(tmp_path / "a")["rank00000"].ended == "exception: KeyboardInterrupt"
