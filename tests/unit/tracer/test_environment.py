"""Tests of what is noted of a run's surroundings."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from tensortrace.tracer.environment import (
    allowed_variables,
    git_state,
    launch_environment,
    rank_environment,
)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    outcome = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return outcome.stdout.strip()


def test_only_listed_variables_are_noted() -> None:
    found = allowed_variables(
        {"RANK": "1", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root", "NCCL_ALGO": "Ring"}
    )
    assert found == {"RANK": "1", "NCCL_ALGO": "Ring"}


def test_the_commit_and_whether_tracked_files_changed_are_noted(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    (tmp_path / "untracked").write_text("x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == (commit, True)


def test_outside_a_repository_the_commit_is_unknown(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)


def test_the_launcher_notes_versions_and_the_masked_command(tmp_path: Path) -> None:
    noted = launch_environment(["python", "t.py", "--token=abc"], {"RANK": "0"}, folder=tmp_path)
    assert noted.versions["python"] == platform.python_version()
    assert noted.versions["torch"] == torch.__version__
    assert noted.command == ("python", "t.py", "--token=***")
    assert noted.variables == {"RANK": "0"}


def test_a_rank_notes_the_flags_that_change_numbers_and_leaves_the_generators_alone() -> None:
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    noted = rank_environment(["t.py"], {})
    assert torch.equal(torch.get_rng_state(), before)
    assert noted.flags["initial_seed"] == "1234"
    assert noted.flags["default_dtype"] == "torch.float32"
    assert noted.flags["deterministic_algorithms"] == "False"
