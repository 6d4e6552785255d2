"""A slip of the pen is told in one line, with what was meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli import main
from tensortrace.tracer.nearest import meant, nearest, nearest_to_glob, sibling
from tests.synthetic import write_trace

X = np.arange(3, dtype=np.float32)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with two traces in ``runs``."""
    for name in ("one", "two"):
        write_trace(tmp_path / "runs" / name, [[({"name": "blocks.0.attention"}, X), ({"name": "head"}, X)]])
    (tmp_path / "layout.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "likely"),
    [
        ("dif runs/one runs/two", "diff"),
        ("diff runs/one runs/two --exat", "--exact"),
        ("diff runs/one runs/two --kinds parm", "param"),
        ("diff runs/onee runs/two", "runs/one"),
        ("diff runs/one runs/tow", "runs/two"),
        ("diff runs/one runs/two --include 'blocks.0.atention*'", "blocks.0.attention"),
        ("diff runs/one runs/two --layout layuot.toml", "layout.toml"),
        ("show runs/one --name blokcs.0.attention", "blocks.0.attention"),
        ("show runs/one --name 'hed*'", "head"),
        ("show runs/one --step 0..3", "0-3"),
        ("show runs/one --step 3-1", "1-3"),
        ("show runs/one --step inti", "init"),
        ("check rusn/one", None),
        ("record -o x --steps 0:2 true", "0-2"),
        ("record -o x --init-from runs/tw true", "runs/two"),
    ],
)
def test_what_was_meant_is_said_in_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], line: str, likely: str | None
) -> None:
    assert main.run([word.strip("'") for word in line.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith(f"did you mean {likely}?\n" if likely else "no such folder\n")


def test_a_glob_of_a_diff_that_fits_nothing_is_noted_with_what_is_near(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main.run(["diff", "runs/one", "runs/two", "--exclude", "heda*"])
    said = " ".join(capsys.readouterr().out.split())
    assert "note: --exclude 'heda*' fits no name of either run; did you mean head?" in said


def test_nearness_knows_no_case_and_nothing_far() -> None:
    assert nearest("PARAMS", ("input", "param")) == "param"
    assert nearest("gradients", ("input", "param")) is None


def test_a_glob_may_mean_a_module_above_the_names() -> None:
    assert nearest_to_glob("layrs.*", ["layers.0.up", "layers.1.up"]) == "layers"


def test_a_path_is_not_looked_for_beside_nothing(tmp_path: Path) -> None:
    assert sibling(tmp_path / "no" / "where") is None


def test_a_hostile_name_is_escaped() -> None:
    assert meant("a\x1b[2J\u202e") == "did you mean a\\x1b[2J\\u202e?"
