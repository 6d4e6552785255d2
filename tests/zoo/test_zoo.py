"""A part of the zoo on every run, and with ``-m slow`` all of it: each mistake named, no alarm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import harness
from tests.zoo.case import Draw, Legal, Pair, Run
from tests.zoo.judging import judge_legal
from tests.zoo.recording import Recordings, finish

QUICK = ["lm-ddp", "lm-accumulate"]


def _rows(folder: Path, *options: str, limit_s: float = 300) -> list[dict[str, object]]:
    listed = folder / "rows.json"
    command = [sys.executable, "-m", "tests.zoo", "--fork", "--report", "--json", str(listed), *options]
    done = finish(command, folder=harness.ROOT, limit_s=limit_s)
    assert done.exit_code == 0, done.output + done.errors
    rows: list[dict[str, object]] = json.loads(listed.read_text())
    return rows


def test_some_of_the_zoo_is_judged_rightly(tmp_path: Path) -> None:
    rows = _rows(tmp_path, *(part for name in QUICK for part in ("--only", name)))
    assert [(row["name"], row["said"]) for row in rows] == [(name, "equivalent") for name in QUICK]


def test_a_program_that_crashes_is_a_row(tmp_path: Path) -> None:
    run = Run("lm.py", 1, ("--no-such-option",))
    row = judge_legal(Legal("crash", "", lambda draw: Pair(run, run)), Draw(0), Recordings(tmp_path))
    assert (row.said, row.right) == ("broken", False)
    assert "unrecognized arguments" in row.detail


@pytest.mark.slow
def test_all_of_the_zoo_is_judged_rightly(tmp_path: Path) -> None:
    assert len(_rows(tmp_path, limit_s=7200)) >= 85
