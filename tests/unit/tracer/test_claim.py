"""Tests of who may write a rank's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensortrace.tracer.claim import claim
from tensortrace.tracer.errors import BadRequest

HOST = "here"


def claim_in(root: Path, *, attempt: int = 0) -> int:
    def open_folder(number: int) -> Path:
        folder = root / ("rank00000" + (f".r{number}" if number else ""))
        folder.mkdir(parents=True)
        return folder

    return claim(root, 0, attempt=attempt, host=HOST, open_folder=open_folder)[1]


def own(folder: Path, *, pid: int, ended: str = "null", host: str = HOST) -> None:
    (folder / "rank.json").write_text(f'{{"pid": {pid}, "host": "{host}", "ended": {ended}}}')


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_the_first_process_gets_the_plain_folder(tmp_path: Path) -> None:
    assert claim_in(tmp_path / "new") == 0
    assert (tmp_path / "new" / "rank00000").is_dir()


def test_an_elastic_restart_gets_its_own_number(tmp_path: Path) -> None:
    claim_in(tmp_path)
    assert claim_in(tmp_path, attempt=1) == 1


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    claim_in(tmp_path)
    own(tmp_path / "rank00000", pid=os.getpid())
    with pytest.raises(BadRequest, match=f"rank 0 is already recorded by process {os.getpid()}"):
        claim_in(tmp_path)


@pytest.mark.parametrize("how", ["finished", "killed"])
def test_after_the_first_has_ended_the_next_gets_the_next_attempt(tmp_path: Path, how: str) -> None:
    claim_in(tmp_path)
    if how == "finished":
        own(tmp_path / "rank00000", pid=os.getpid(), ended='"finished"')
    else:
        own(tmp_path / "rank00000", pid=dead_pid())
    assert claim_in(tmp_path) == 1


def test_a_process_of_another_host_counts_as_alive(tmp_path: Path) -> None:
    claim_in(tmp_path)
    own(tmp_path / "rank00000", pid=dead_pid(), host="elsewhere")
    with pytest.raises(BadRequest):
        claim_in(tmp_path)


def test_a_folder_that_does_not_say_whose_it_is_is_left_alone(tmp_path: Path) -> None:
    claim_in(tmp_path)
    with pytest.raises(BadRequest):
        claim_in(tmp_path)
