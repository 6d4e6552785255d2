"""The examples run as they stand. ``train_gpt.py`` is recorded by many tests; the other one is run here."""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path

import pytest

from tests import harness

EXAMPLES = sorted(harness.EXAMPLE.parent.glob("*.py"))
NONDETERMINISTIC = harness.EXAMPLE.with_name("nondeterministic.py")
CLASSES = 10


def first_loss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> float:
    monkeypatch.setattr(sys, "argv", [str(NONDETERMINISTIC), "--steps", "1", *options])
    runpy.run_path(str(NONDETERMINISTIC), run_name="__main__")
    word, loss = capsys.readouterr().out.split()
    assert word == "loss"
    return float(loss)


@pytest.mark.parametrize("mistake", ["", "lost-chunk", "scaled-head", "stale-bias"])
def test_the_first_loss_is_about_that_of_a_guess_whatever_is_planted_in_gradients(
    mistake: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = first_loss(capsys, monkeypatch, *(("--plant", mistake) if mistake else ()))
    assert loss == pytest.approx(math.log(CLASSES), abs=0.5)
    assert loss == first_loss(capsys, monkeypatch)


def test_there_is_no_example_that_no_test_runs() -> None:
    assert [Path(example).name for example in EXAMPLES] == ["nondeterministic.py", "train_gpt.py"]
