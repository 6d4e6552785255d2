"""A part of the zoo on every run, and with ``-m slow`` all of it: each mistake named, no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo import collection
from tests.zoo.__main__ import arguments, rows_of
from tests.zoo.case import Draw, Legal, Pair, Run
from tests.zoo.judging import judge_legal
from tests.zoo.recording import Recordings
from tests.zoo.report import table

QUICK = ["lm-again", "lm-ddp"]


def _rows(folder: Path, *options: str) -> str:
    rows = rows_of(arguments([*options]), folder, lambda row: None)
    assert rows
    wrong = [f"{row.name}: {row.said}, {row.detail}" for row in rows if not row.right]
    assert not wrong, table(rows) + "\n".join(wrong)
    return table(rows)


def test_some_of_the_zoo_is_judged_rightly(tmp_path: Path) -> None:
    shown = _rows(tmp_path, *(part for name in QUICK for part in ("--only", name)))
    assert f"{len(collection.legal_pairs(QUICK))} legal pairs: 0 alarms, 0 not judged" in shown


def test_a_program_that_crashes_is_a_row(tmp_path: Path) -> None:

    run = Run("lm.py", 1, ("--no-such-option",))
    row = judge_legal(Legal("crash", "", lambda draw: Pair(run, run)), Draw(0), Recordings(tmp_path))
    assert (row.said, row.right) == ("broken", False)
    assert "unrecognized arguments" in row.detail


@pytest.mark.slow
def test_all_of_the_zoo_is_judged_rightly(tmp_path: Path) -> None:
    _rows(tmp_path)
