"""A recording that keeps its last steps, with real signals, kills and ranks: what is left, what is said."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Kind, Window
from tests.faults.running import (
    LIMIT_S,
    PROGRAMS,
    PYTHON,
    TRAIN,
    environment,
    plain,
    ranks_of,
    record_command,
    recorded,
    torchrun,
    wait_for_line,
)

FLIGHT = (PYTHON, str(PROGRAMS / "flight.py"))
KEEP = ("--keep-last", "3", "--trigger", "nonfinite,loss-spike,SIGUSR1")


def window_of(root: Path, rank: int = 0) -> Window:
    window = ranks_of(root)[f"rank{rank:05d}"].window
    assert window is not None
    return window


def steps_of(root: Path, rank: int = 0) -> set[int]:
    """Return the steps of a rank that are there but for parameters; every tensor of them is read."""
    with Trace.open(root) as trace:
        source = next(each for each in trace.ranks if each.rank == rank)
        for entry in source.entries:
            source.read(entry)
        return {entry.step for entry in source.entries if entry.kind is not Kind.PARAM}


def start(root: Path, *command: str, options: tuple[str, ...] = KEEP) -> subprocess.Popen[str]:
    return subprocess.Popen(
        record_command(root, *command, options=options),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_steps_around_the_first_nan_are_kept_and_training_goes_on(tmp_path: Path) -> None:
    """The NaN enters in step 6: with one more step after, steps 4 to 7 are kept."""
    root = tmp_path / "a"
    command = (*FLIGHT, "--nan-at", "6")
    ran = recorded(root, *command, options=(*KEEP, "--after", "1"))
    assert (ran.code, ran.out) == (0, plain(*command).out), "bitwise the same run"
    window = window_of(root)
    found = window.triggered
    assert found is not None
    assert (window.first, window.last, found.trigger, found.step) == (4, 7, "nonfinite", 6)
    assert (found.kind, found.name, found.slot) == (Kind.ACTIVATION, "(root)", "in.0")
    assert found.text == "1 NaN of 512 elements"
    assert steps_of(root) == {4, 5, 6, 7}
    assert list(check(root)) == []
    [said] = ran.warnings
    assert "rank 0: nonfinite in step 6" in said
    assert "steps 4-7 are kept, then recording ends; training goes on" in said


@pytest.mark.slow
def test_a_jump_of_the_loss_is_a_trigger_and_its_steps_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "a"
    recorded(root, *FLIGHT, "--steps", "24", "--spike-at", "20", options=KEEP)
    found = window_of(root).triggered
    assert found is not None
    assert (found.trigger, found.step, found.kind, found.name) == (
        "loss-spike",
        20,
        Kind.LOSS,
        "cross_entropy",
    )
    assert steps_of(root) == {18, 19, 20}


@pytest.mark.slow
def test_steps_that_a_loss_scaler_skips_are_no_trigger(tmp_path: Path) -> None:
    """In step 1 of the program every gradient is infinite, and the scaler skips it."""
    ran = recorded(tmp_path / "a", *TRAIN, "--steps", "5", options=KEEP)
    window = window_of(tmp_path / "a")
    assert (window.first, window.last, window.triggered, window.notes) == (2, None, None, ())
    assert (ran.warnings, ran.digests) == ([], plain(*TRAIN, "--steps", "5").digests)
    assert steps_of(tmp_path / "a") == {2, 3, 4}


@pytest.mark.parametrize("handle", [pytest.param((), marks=pytest.mark.slow), ("--handle", "before")])
def test_a_signal_to_the_recording_freezes_the_window(tmp_path: Path, handle: tuple[str, ...]) -> None:
    """It goes to the rank, beside the program's own handler; without one the program lives on, too."""
    root, until = tmp_path / "a", tmp_path / "until"
    with start(root, *FLIGHT, "--steps", "100000", "--until", str(until), *handle) as child:
        wait_for_line(child, count=9)
        child.send_signal(signal.SIGUSR1)
        assert child.stderr is not None
        assert "SIGUSR1 in step" in child.stderr.readline()
        until.touch()
        out, _ = child.communicate(timeout=LIMIT_S)
    found = window_of(root).triggered
    assert found is not None
    assert (child.returncode, found.trigger, found.kind) == (0, "SIGUSR1", None)
    assert found.step >= 8
    assert steps_of(root) == {found.step - 2, found.step - 1, found.step}
    assert ("handled" in out) == bool(handle)


@pytest.mark.slow
def test_a_handler_that_the_program_sets_later_wins_and_is_said(tmp_path: Path) -> None:
    ran = recorded(tmp_path / "a", *FLIGHT, "--steps", "6", "--handle", "after", options=KEEP)
    note = "SIGUSR1 is no trigger any more: the program has set a handler of its own"
    assert window_of(tmp_path / "a").notes == (note,)
    assert [note in line for line in ran.warnings] == [True]


@pytest.mark.slow
def test_a_killed_process_leaves_its_last_steps_in_bounded_space(tmp_path: Path) -> None:
    """SIGKILL at any time: what is there is three whole steps, the one that was running, and no more."""
    root = tmp_path / "a"
    whole = tmp_path / "whole"
    recorded(whole, *FLIGHT, "--steps", "2", options=("--keep-last", "9"))
    seen = 0
    with start(root, *FLIGHT, "--steps", "100000", "--until", str(tmp_path / "never")) as child:
        wait_for_line(child, count=8)
        for _ in range(20):
            wait_for_line(child)
            seen = max(seen, stored_bytes(root))
        os.kill(ranks_of(root)["rank00000"].pid, signal.SIGKILL)
        child.communicate(timeout=LIMIT_S)
    steps = sorted(steps_of(root))
    assert steps[-1] >= 25
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert 3 <= len(steps) <= 4
    a_step = stored_bytes(whole) / 2
    assert seen < 5.2 * a_step


def stored_bytes(root: Path) -> int:
    total = 0
    for path in root.glob("rank*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it was dropped meanwhile
            continue
    return total


@pytest.mark.slow
def test_ranks_trigger_on_their_own_and_end_with_common_steps(tmp_path: Path) -> None:
    """The NaN is in the last rank's inputs; the reduced gradients bring it to the other in the same step."""
    root = tmp_path / "a"
    command = torchrun(FLIGHT[1], "--nan-at", "6")
    ran = recorded(root, *command, options=KEEP)
    assert (ran.code, ran.digests) == (0, plain(*command).digests)
    found = [window_of(root, rank).triggered for rank in (0, 1)]
    assert [(each.step, each.kind) for each in found if each] == [
        (6, Kind.REDUCED_GRAD), (6, Kind.ACTIVATION),
    ]  # fmt: skip
    assert steps_of(root, 0) == steps_of(root, 1) == {4, 5, 6}
    assert list(check(root)) == []
