"""The page of measurements has the structure that its generator writes; figures differ between machines."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import trace_size
from docs import performance
from tests.synthetic import write_trace

PAGE = performance.PAGE.read_text(encoding="utf-8")
BLOCKS = {block["command"]: block["shown"] for block in performance.BLOCK.finditer(PAGE)}
NUMBER = re.compile(r"\d[\d.]*")
SIZES = "python benchmarks/trace_size.py --compress "


def words(lines: list[str]) -> list[str]:
    return [" ".join(NUMBER.sub("#", line).split()) for line in lines]


def test_the_page_is_in_shape() -> None:
    assert performance.problems(PAGE) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("$ python -m docs.performance --machine\n", "", "its block begins with"),
        ("-->\n```text\n", "-->\n```\n", "no block of text follows it"),
        ("made by: python benchmarks/sketch_accuracy.py", "by: nobody", "accuracy.py: not on the page"),
        ("python benchmarks/trace_size.py", "python benchmarks/trace_sizes.py", "there is no"),
        ("--compress auto --ranks", "--compress auto --rank", "no option --rank"),
        ("--compress planes -->", "--compress auto -->", "twice on the page"),
    ],
)  # fmt: skip
def test_a_page_out_of_shape_is_told(old: str, new: str, problem: str) -> None:
    assert old in PAGE
    assert problem in "\n".join(performance.problems(PAGE.replace(old, new)))


@pytest.mark.parametrize(("command", "ranks"), [(SIZES + "auto", 1), (SIZES + "planes --ranks 2", 2)])
def test_the_lines_about_sizes_are_those_that_the_benchmark_prints(
    command: str, ranks: int, tmp_path: Path
) -> None:
    root = write_trace(tmp_path / "t", [[({}, np.arange(2000, dtype="<f4"))]] * ranks)
    if BLOCKS[command] == performance.UNMEASURED:
        pytest.skip("not measured yet")
    assert words(BLOCKS[command].splitlines()[2:]) == words(trace_size.report(root))


def test_the_lines_about_the_machine_are_those_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(performance, "ROUNDS", 1)
    labels = [line[:23].rstrip() for line in performance.machine()]
    assert [line[:23].rstrip() for line in BLOCKS[performance.MACHINE].splitlines()[2:]] == labels
