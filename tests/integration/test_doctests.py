"""The examples of the public API run, those in docstrings on two small traces ``a`` and ``b``."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.result import Result
from tensortrace.diff.tensors import OverSteps
from tensortrace.tracer.types import Kind
from tests.conftest import RecordExample
from tests.simulated import At, Program

MODULES = (
    "tensortrace.tracer", "tensortrace.diff.opened", "tensortrace.diff.engine", "tensortrace.diff.result",
    "tensortrace.replay.result",
)  # fmt: skip

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Wrong(Program):
    """From step 1 on, one module's output is half a percent too large."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        wrong = at.step >= 1 and (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "out")
        return value * np.float32(1.005) if wrong else value


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctests")
    Program().write(folder / "a")
    Wrong(ranks=2).write(folder / "b")
    return folder


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_hold(module: str, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(traces)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=flags)
    found = [test for test in doctest.DocTestFinder().find(importlib.import_module(module)) if test.examples]
    assert found, "a module without examples"
    for test in found:
        runner.run(test, out=told.append)
    assert runner.failures == 0, "".join(told)


def test_the_blocks_of_the_page_run_one_after_another(
    recorded: RecordExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "runs").mkdir()
    for name, ranks in (("one", 1), ("two", 2)):
        (tmp_path / "runs" / name).symlink_to(recorded(ranks))
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)  # noqa: S102 - the page is ours
    weight, result = names["weights"], names["result"]
    assert isinstance(weight, OverSteps)
    assert len(weight) == 6  # five steps and init
    assert isinstance(result, Result)
    assert result, result.headline
    assert len(names["table"]) == len(result.boundaries) > 500  # type: ignore[arg-type]
