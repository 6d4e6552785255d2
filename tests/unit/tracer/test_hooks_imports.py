"""Parts of modules that the program imports later are replaced as soon as they exist."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tensortrace.tracer.hooks import guard
from tensortrace.tracer.hooks.imports import when_imported
from tensortrace.tracer.hooks.patches import Patches
from tests.memory_sink import MemorySink

NAME = "imported_late_by_a_test"


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemorySink]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sink = MemorySink()
    guard.arm(sink)
    yield sink
    guard.disarm()
    sys.modules.pop(NAME, None)


def double(module: ModuleType) -> None:
    module.value *= 2


def test_a_module_is_changed_once_it_has_run_and_not_when_it_is_only_looked_for(sink: MemorySink) -> None:
    when_imported(Patches(), NAME, double)
    assert importlib.util.find_spec(NAME) is not None
    module = importlib.import_module(NAME)
    assert module.value == 2
    assert module.__loader__ is module.__spec__.loader
    assert "tensortrace" not in type(module.__loader__).__module__
    assert importlib.reload(module).value == 1


def test_a_module_that_was_imported_before_is_changed_at_once(sink: MemorySink) -> None:
    module = importlib.import_module(NAME)
    when_imported(Patches(), NAME, double)
    assert module.value == 2


def test_after_the_recording_an_import_changes_nothing(sink: MemorySink) -> None:
    patches, finders = Patches(), list(sys.meta_path)
    when_imported(patches, NAME, double)
    patches.undo()
    assert sys.meta_path == finders
    assert importlib.import_module(NAME).value == 1


def test_an_error_of_ours_does_not_reach_the_program_that_imports(sink: MemorySink) -> None:
    when_imported(Patches(), NAME, lambda module: module.nothing.here)
    assert importlib.import_module(NAME).value == 1
    assert [where for where, _ in sink.failures] == ["module imported"]
