"""Tests of what a diff says of runs that were asked to begin in different ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tensortrace.diff.starts import start_notes
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Environment
from tests.synthetic import write_trace


def trace(folder: Path, **flags: str) -> Trace:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    environment = Environment(flags={"threads": "1"} | {f"start.{name}": v for name, v in named.items()})
    tensor = ({"kind": "param", "name": "w", "slot": "model", "step": -1}, np.ones(2))
    return Trace.open(write_trace(folder, [[tensor]], environment=environment))


def test_runs_that_began_alike_need_no_word(tmp_path: Path) -> None:
    plain = trace(tmp_path / "plain")
    one, two = (trace(tmp_path / name, consistent_init="3") for name in ("one", "two"))
    assert start_notes(plain, plain) == start_notes(one, two) == []


def test_runs_that_did_not_are_told_with_both_sides_options(tmp_path: Path) -> None:
    a = trace(tmp_path / "a")
    b = trace(tmp_path / "b", consistent_init="0", adversarial="True")
    assert start_notes(a, b) == [
        "the runs were not started alike: a as its program says, b with --consistent-init 0 --adversarial"
    ]
    c = trace(tmp_path / "c", consistent_dropout="1")
    assert start_notes(c, b)[0].startswith(
        "the runs were not started alike: a with --consistent-dropout 1, b"
    )
