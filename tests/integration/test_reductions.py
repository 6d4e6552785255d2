"""However gradients meet across ranks: no bit changes, one rank equals two, what is forgotten is named."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tensortrace.diff.engine import compare
from tensortrace.diff.result import Result
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests import harness

pytestmark = pytest.mark.slow

SCRIPT = harness.TRAINING / "reducing.py"
WRAPPED = (
    "ddp", "every", "views", "static", "buckets", "hooked", "own", "zero", "hand", "scattered",
    "flattened", "flat-views", "in-hooks",
)  # fmt: skip
OF_ITS_OWN = ("unused", "joined", "in-backward")
COARSE = ("fp16", "powersgd")
PLANTED = (
    "ddp:quiet", "own:twice", "hand:left-out", "scattered:left-out", "flattened:left-out", "hand:early",
    "joined:every", "descent:rate", "descent:left-out",
)  # fmt: skip
WITHOUT_OPTIMIZER = (
    ("descent", "descent"), ("descent", "subtracting"), ("sgd", "descent"), ("sgd", "rebinding"),
    ("fused", "fused"),
)  # fmt: skip


class Traces(NamedTuple):
    """``folder/RANKS/CASE``, and what each process said: (case, digest alone, digest recorded)."""

    folder: Path
    told: list[list[str]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Run every case in one launch on one rank and in one launch on two."""
    folder = tmp_path_factory.mktemp("reducing")
    told = []
    alone = tuple(dict.fromkeys(a for a, _ in WITHOUT_OPTIMIZER))
    by_hand = tuple(dict.fromkeys(b for _, b in WITHOUT_OPTIMIZER))
    launches = (
        (1, ("ddp", *OF_ITS_OWN, *alone)),
        (2, (*WRAPPED, *OF_ITS_OWN, *by_hand, *COARSE, *PLANTED)),
    )
    for ranks, cases in launches:
        done = harness.run(harness.on_ranks(ranks, SCRIPT, folder / str(ranks), *cases))
        assert done.exit_code == 0, done.errors
        lines = [line.split() for line in done.output.splitlines()]
        lines = [line for line in lines if line[0] in cases]  # torch warns, too
        assert sorted(name for name, *_ in lines) == sorted(cases * ranks), done.errors
        told += lines
    return Traces(folder, told)


def diff(traces: Traces, a: str, b: str) -> Result:
    return compare(traces.folder / "1" / a, traces.folder / "2" / b)


def place(result: Result) -> tuple[object, ...]:
    assert result.first_divergent is not None, result.headline
    where = result.first_divergent.where
    return where.step, where.kind, where.name


def test_recording_changes_no_bit(traces: Traces) -> None:
    assert [name for name, alone, recorded in traces.told if alone != recorded or alone == "failed"] == []


def test_every_recording_is_finished(traces: Traces) -> None:
    for folder in traces.folder.glob("*/*"):
        with Trace.open(folder) as trace:
            assert {r.manifest and r.manifest.ended for r in trace.ranks} == {"finished"}, folder


@pytest.mark.parametrize("case", WRAPPED)
def test_one_rank_and_two_are_equivalent(traces: Traces, case: str) -> None:
    result = diff(traces, "ddp", case)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.by_kind[Kind.REDUCED_GRAD] == 3 * 6


@pytest.mark.parametrize("case", OF_ITS_OWN)
def test_one_rank_and_two_of_the_same_program_are_equivalent(traces: Traces, case: str) -> None:
    result = diff(traces, case, case)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.by_kind[Kind.REDUCED_GRAD] == 3 * 6


@pytest.mark.parametrize(("a", "b"), WITHOUT_OPTIMIZER)
def test_updates_without_an_optimizer_make_steps(traces: Traces, a: str, b: str) -> None:
    result = diff(traces, a, b)
    assert result.verdict == "equivalent", result.headline
    assert result.a.steps == result.b.steps == 3
    assert result.coverage.by_kind[Kind.REDUCED_GRAD] == 3 * 6
    assert result.coverage.by_kind[Kind.PARAM] >= 3 * 6  # at the start, and after two updates
    assert any("compared up to one factor" in note for note in result.notes)


def test_a_wrong_rate_without_an_optimizer_is_told_at_the_parameters(traces: Traces) -> None:
    result = diff(traces, "descent", "descent:rate")
    assert place(result)[:2] == (0, "param")
    assert len([o for o in result.origins if o.where.step == 0]) == 6


def test_a_parameter_left_out_without_an_optimizer_is_told_where_ranks_part(traces: Traces) -> None:
    result = diff(traces, "descent", "descent:left-out")
    assert place(result) == (0, "param", "second.weight")
    assert result.causes[0].code == "replica.disagrees"


def test_a_hook_that_rounds_is_told_at_the_reduction(traces: Traces) -> None:
    # float16 keeps 11 bits: each rank's half is off by at most 2^-12 of itself, and so is the sum.
    result = diff(traces, "ddp", "fp16")
    assert place(result)[:2] == (0, "reduced_grad")
    assert result.first_divergent is not None
    assert result.first_divergent.metrics is not None
    assert 2**-15 < (result.first_divergent.metrics.rel_l2 or 0) < 2**-10


def test_a_hook_that_approximates_is_told_in_the_step_in_which_it_begins(traces: Traces) -> None:
    # PowerSGD reduces exactly until step 2, and vectors always: only matrices are approximated.
    result = diff(traces, "ddp", "powersgd")
    assert place(result)[:2] == (2, "reduced_grad")
    assert {o.where.name for o in result.origins} == {"first.weight", "second.weight", "head.weight"}


def test_no_reduction_at_all_is_named(traces: Traces) -> None:
    result = diff(traces, "ddp", "ddp:quiet")
    assert place(result)[:2] == (0, "clipped_grad")
    assert result.causes[0].code == "reduction.missing"


@pytest.mark.parametrize("case", ["hand:left-out", "scattered:left-out", "flattened:left-out"])
def test_a_parameter_that_is_left_out_of_the_reduction_is_named(traces: Traces, case: str) -> None:
    result = diff(traces, "ddp", case)
    assert place(result) == (0, "clipped_grad", "second.weight")
    assert {o.where.name for o in result.origins if o.where.step == 0} == {"second.weight"}
    assert result.causes[0].code == "reduction.missing"


def test_a_hook_that_divides_twice_is_named_with_its_factor(traces: Traces) -> None:
    result = diff(traces, "ddp", "own:twice")
    assert place(result)[:2] == (0, "reduced_grad")
    assert result.causes[0].code == "scale.world_size"
    assert result.causes[0].number == pytest.approx(0.5, rel=1e-5)


def test_a_reduction_before_the_last_microbatch_is_named(traces: Traces) -> None:
    result = diff(traces, "ddp", "hand:early")
    assert result.causes[0].code == "reduction.early"
    assert "after microbatch 0 of 2" in result.causes[0].text


@pytest.mark.parametrize(("case", "step"), [("hand:early", 0), ("joined:every", 2)])
def test_a_reduction_that_lacks_a_microbatch_is_told_where_it_happens(
    traces: Traces, case: str, step: int
) -> None:
    result = diff(traces, "joined" if step else "ddp", case)
    assert place(result)[:2] == (step, "reduced_grad")
    assert {o.where.kind for o in result.origins if o.where.step == step} == {"reduced_grad"}
