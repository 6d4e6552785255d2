"""A detector that fails costs its own proposals only, and is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.diff import causes
from tensortrace.tracer.types import Kind
from tests.integration.judged import codes, judge_in, tampering
from tests.simulated import Program


def test_the_verdict_stands_and_the_failure_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: object) -> list[object]:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(causes, "DETECTORS", (failing, *causes.DETECTORS))
    wrong = tampering(Kind.ACTIVATION, "act", "out", lambda v: -v, step=0)
    result = judge_in(tmp_path)(Program(steps=1), wrong(steps=1))
    assert codes(result) == ["value.sign"]
    assert any("failing" in note and "by nothing" in note for note in result.notes)
