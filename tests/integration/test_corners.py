"""Corners of training code: recorded without a trace in the numbers, equivalent on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests import harness

SCRIPT = harness.TRAINING / "corners.py"
PAIRS = ("adversaries", "frozen_encoder", "skips", "recomputing", "averages")
ALONE = (*PAIRS, "averages:decay", "recomputing:dropout", "recomputing:lost", "batch_norm")
ON_TWO = (*PAIRS, "recomputing:other", "skips:continue", "skips:scaler", "batch_norm", "adversaries:bare")


class Corners(NamedTuple):
    """``traces/RANKS/CASE`` and what each process said: (case, digest alone, digest recorded)."""

    traces: Path
    told: list[list[str]]


@pytest.fixture(scope="module")
def corners(tmp_path_factory: pytest.TempPathFactory) -> Corners:
    """Run every case in one launch on one rank and in one launch on two."""
    folder = tmp_path_factory.mktemp("corners")
    told = []
    for ranks, cases in ((1, ALONE), (2, ON_TWO)):
        done = harness.run(harness.on_ranks(ranks, SCRIPT, folder / str(ranks), *cases))
        assert done.exit_code == 0, done.errors
        told += [line.split() for line in done.output.splitlines()]
    return Corners(folder, told)


def diff(corners: Corners, case: str, bug: str = "") -> harness.Diffed:
    return harness.diff(corners.traces / "1" / case, corners.traces / "2" / (case + bug))


def test_recording_changes_no_bit(corners: Corners) -> None:
    assert sorted(name for name, *_ in corners.told) == sorted([*ALONE, *ON_TWO * 2])
    assert [name for name, alone, recorded in corners.told if alone != recorded] == []


@pytest.mark.parametrize("case", PAIRS)
def test_one_rank_and_two_are_equivalent(corners: Corners, case: str) -> None:
    outcome = diff(corners, case)
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete, outcome.summary()


def test_a_critic_that_was_not_wrapped_is_named_where_its_gradients_stay_apart(corners: Corners) -> None:
    # What comes after follows from it: in the generator's steps, too, which don't touch the critic.
    outcome = diff(corners, "adversaries", ":bare")
    origins = {(o.where.step, o.where.kind, o.where.name.partition(".")[0]) for o in outcome.result.origins}
    assert origins == {(0, "clipped_grad", "Critic")}, outcome.summary()
    assert outcome.result.causes[0].code == "reduction.missing"


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


def test_a_reentrant_checkpoint_and_another_are_equivalent_to_none(corners: Corners) -> None:
    assert diff(corners, "recomputing", ":other").exit_code == 0


def test_a_recompute_that_is_not_the_first_pass_is_named(corners: Corners) -> None:
    folder = corners.traces / "1"
    outcome = harness.diff(folder / "recomputing:dropout", folder / "recomputing:lost")
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    where = first.where
    assert (where.step, where.kind, where.name, where.slot) == (
        0, "activation", "blocks.0.2", "out (recomputed)",
    )  # fmt: skip
    assert cause.code == "recompute.differs"
    assert cause.text.startswith("Dropout blocks.0.2")


def test_a_batch_norm_over_other_parts_of_the_batch_is_named(corners: Corners) -> None:
    outcome = diff(corners, "batch_norm")
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    assert (first.where.kind, first.where.name, first.where.slot) == ("activation", "1", "out")
    assert (cause.code, cause.number) == ("batch.coupled", 2.0)
    assert cause.text.startswith("BatchNorm1d 1 computes its statistics over each rank's microbatch")


def test_averages_of_the_model_are_buffers_under_names_of_their_own(corners: Corners) -> None:
    folder = corners.traces / "1"
    with Trace.open(folder / "averages") as trace:
        entries = [entry for entry in trace.ranks[0].entries if entry.kind is Kind.BUFFER]
        schedules = {e.name for e in trace.ranks[0].entries if e.kind is Kind.SCHEDULE}
    names = [f"{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")]
    prefixes = ("AveragedModel.module", "Sequential", "(copy)")
    expected = {f"{prefix}.{name}" for prefix in prefixes for name in names}
    assert {entry.name for entry in entries} == {*expected, "AveragedModel.n_averaged"}
    windows = 3  # when the recording ends, the program has let go of its averages: the last value is there
    assert len(entries) == windows * (3 * len(names) + 1)
    assert {"optimizer.0", "optimizer.1"} <= schedules, "one of them leaves out super().__init__()"
    outcome = harness.diff(folder / "averages", folder / "averages:decay")
    assert {o.where.kind for o in outcome.result.origins} == {"buffer"}
    assert {o.where.name for o in outcome.result.origins} == {f"(copy).{name}" for name in names}
