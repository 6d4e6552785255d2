"""A program says in words how what it names lies over its ranks, and the diff honours it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import TRAINING, Diffed, diff, python, run, torchrun

NAMED = TRAINING / "named.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("named")
    for command in (python(NAMED, folder), torchrun(2, NAMED, folder)):
        done = run(command)
        assert done.exit_code == 0, done.errors
    return folder


def judged(traces: Path, name: str, *options: str) -> tuple[Diffed, list[str]]:
    outcome = diff(traces / "one", traces / name, *options)
    return outcome, [note for note in outcome.result.notes if "is not honoured" in note]


def test_the_axes_are_the_layout_files_that_was_recorded(traces: Path) -> None:
    outcome, vain = judged(traces, "file")
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete
    assert vain == []


def test_the_axes_are_those_of_a_mesh_given_at_the_call(traces: Path) -> None:
    outcome, vain = judged(traces, "mesh", "--kinds", "activation,activation_grad", "--include", "scores")
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.by_kind == {"activation": 2, "activation_grad": 2}
    assert vain == []


def test_a_gradient_that_lies_otherwise_than_said_is_told_and_its_value_is_not(traces: Path) -> None:
    outcome, _ = judged(traces, "grad")
    places = {(origin.where.kind, origin.where.name) for origin in outcome.result.origins}
    assert outcome.exit_code == 1
    assert places == {("activation_grad", "scores")}, outcome.summary()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vain", "layout 'b heads[tp] s t' of scores is not honoured: no mesh of axes tp is known"),
        ("garbled", "layout 'b heads[tp' of scores is not honoured: found 'the end', expected ']'"),
        ("unfit", "layout 'b s[tp]' of scores is not honoured: shape (2, 2, 6, 6) on rank 0: found 4 dim"),
    ],
)
def test_what_cannot_be_honoured_is_said_once(traces: Path, name: str, why: str) -> None:
    outcome, vain = judged(traces, name)
    assert outcome.exit_code == 1
    assert len(vain) == 1
    assert vain[0].startswith(why)
