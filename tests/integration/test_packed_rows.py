"""Documents meet one by one however they are packed into rows, and whatever says where one begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import TRAINING, diff, python, run

pytestmark = pytest.mark.slow

RIGHT = [
    ("alone", "pairs"), ("pairs", "alone"), ("pairs", "others"),
    ("alone", "line"), ("others", "line"), ("line", "other line"),
]  # fmt: skip

NAMES = ("alone", "pairs", "others", "line", "other line", "leaking", "positions")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    done = run(python(TRAINING / "packed.py", folder, *NAMES))
    assert done.exit_code == 0, done.errors
    return folder


@pytest.mark.parametrize(("a", "b"), RIGHT)
def test_the_same_documents_in_other_rows_are_equivalent(traces: Path, a: str, b: str) -> None:
    outcome = diff(traces / a, traces / b)
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete
    assert outcome.result.coverage.by_kind["activation"] == 26
    assert not [note for note in outcome.result.notes if "by order" in note]


@pytest.mark.parametrize("packing", ["alone", "pairs"])
def test_documents_that_see_their_neighbours_are_told_at_the_attention(traces: Path, packing: str) -> None:
    first = diff(traces / packing, traces / "leaking").result.first_divergent
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.name, first.where.slot) == (
        0,
        "activation",
        "out",
        "in.0",
    )


def test_positions_that_do_not_begin_again_are_told_at_the_input(traces: Path) -> None:
    first = diff(traces / "alone", traces / "positions").result.first_divergent
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.name) == (0, "input", "(root)")
