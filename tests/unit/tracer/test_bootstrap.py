"""Tests of how a process knows its rank and how it ends."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from tensortrace.tracer.bootstrap import how_it_ends, identify
from tensortrace.tracer.recorder import Identity


def ending_of(error: BaseException) -> str:
    """Return what is said while an error is in flight, as in a finalizer of multiprocessing."""
    try:
        raise error
    except BaseException:
        return how_it_ends()


@pytest.fixture(autouse=True)
def _nothing_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_type", raising=False)


def test_an_ordinary_end_is_finished() -> None:
    assert how_it_ends() == "finished"


def test_an_exception_in_flight_is_named() -> None:
    assert ending_of(ValueError("x")) == "exception: ValueError"


def test_an_exception_that_the_interpreter_printed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
    assert how_it_ends() == "exception: KeyboardInterrupt"


@pytest.mark.parametrize("code", [None, 0, 3])
def test_leaving_by_sys_exit_is_finished(code: int | None) -> None:
    assert ending_of(SystemExit(code)) == "finished"


def test_a_sys_exit_that_stands_for_an_exception_names_that_one() -> None:
    error = SystemExit(1)
    error.__context__ = RuntimeError("what torch.multiprocessing caught")
    assert ending_of(error) == "exception: RuntimeError"


def test_without_any_launcher_a_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert identify() == Identity(0, 1, 0)


def test_the_launchers_variables_count_before_torch_distributed_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    assert identify() == Identity(3, 4, 2)


def test_torch_distributed_knows_better_than_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert identify()[:2] == (1, 2)
