"""Corners of training code: recorded without a trace in the numbers, equivalent on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests import harness

SCRIPT = harness.TRAINING / "corners.py"
PAIRS = ("adversaries", "frozen_encoder", "skips")
WRONG = ("skips:continue", "skips:scaler")


class Corners(NamedTuple):
    """``traces/RANKS/CASE`` and what each process said: (case, digest alone, digest recorded)."""

    traces: Path
    told: list[list[str]]


@pytest.fixture(scope="module")
def corners(tmp_path_factory: pytest.TempPathFactory) -> Corners:
    """Run every case in one launch on one rank and in one launch on two."""
    folder = tmp_path_factory.mktemp("corners")
    told = []
    for ranks, cases in ((1, PAIRS), (2, (*PAIRS, *WRONG))):
        done = harness.run(harness.on_ranks(ranks, SCRIPT, folder / str(ranks), *cases))
        assert done.exit_code == 0, done.errors
        told += [line.split() for line in done.output.splitlines()]
    return Corners(folder, told)


def diff(corners: Corners, case: str, bug: str = "") -> harness.Diffed:
    return harness.diff(corners.traces / "1" / case, corners.traces / "2" / (case + bug))


def test_recording_changes_no_bit(corners: Corners) -> None:
    assert sorted(name for name, *_ in corners.told) == sorted([*PAIRS, *(*PAIRS, *WRONG) * 2])
    assert [name for name, alone, recorded in corners.told if alone != recorded] == []


@pytest.mark.parametrize("case", PAIRS)
def test_one_rank_and_two_are_equivalent(corners: Corners, case: str) -> None:
    outcome = diff(corners, case)
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete, outcome.summary()


def test_a_rank_that_goes_on_without_an_update_is_named(corners: Corners) -> None:
    outcome = diff(corners, "skips", ":continue")
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.slot) == (1, "input", "rows")
    assert cause.code == "step.skipped_on_some_ranks"
    assert "rank 1 of b made no optimizer step after microbatch 0 of step 1" in cause.text


def test_a_rank_whose_scaler_alone_found_infinities_is_named(corners: Corners) -> None:
    outcome = diff(corners, "skips", ":scaler")
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.slot) == (1, "schedule", "skipped")
    assert first.ranks == (1,)
    assert cause.code == "step.skipped_on_some_ranks"
    assert "the scaler of rank 1 of b" in cause.text
