"""The examples in docstrings of the public API run, on two small traces ``a`` and ``b``."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.simulated import At, Program

MODULES = (
    "tensortrace.tracer", "tensortrace.diff.opened", "tensortrace.diff.engine", "tensortrace.diff.result",
    "tensortrace.replay.result",
)  # fmt: skip


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
