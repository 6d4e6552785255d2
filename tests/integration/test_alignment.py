"""Steps and rows meet by what they are: resumed runs, other splits, samplers and padding, fused and not.

Four launches (1, 2, 1 and 4 ranks) leave every trace; a launch may resume what an earlier one has saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.diff.engine import CompareOptions, compare
from tests import harness
from tests.harness import Diffed

pytestmark = pytest.mark.slow

SCRIPT = harness.TRAINING / "aligned.py"
APART = harness.TRAINING / "layouts" / "qkv-apart.toml"
SAVED = 3

LAUNCHES: tuple[tuple[int, dict[str, str]], ...] = (
    (
        1,
        {
            "full1": "steps=6,save=one@3",
            "dropout": "steps=6,dropout=0.2,save=dropped@3",
            "dropout-resumed": "steps=6,dropout=0.2,resume=dropped",
            "dropout-generator": "steps=6,dropout=0.2,resume=dropped,plant=generator",
            "resumed": "steps=6,resume=one",
            "moments": "steps=6,resume=one,plant=moments",
            "optimizer": "steps=6,resume=one,plant=optimizer",
            "counter": "steps=6,resume=one,plant=counter",
            "scheduler": "steps=6,resume=one,plant=scheduler",
            "data": "steps=6,resume=one,plant=data",
            "plain": "",
            "split2": "split=2",
            "split4": "split=4",
            "repeat": "repeat=1",
            "thirteen": "rows=13",
            "long": "padded=12",
            "filled": "filler=2,padded=12",
            "attention": "attention=hand",
            "norm": "norm=hand",
            "loss": "loss=hand",
            "loss-filled": "loss=hand,filler=2",
            "fused": "optimizer=fused",
            "loop": "optimizer=loop",
            "apart": "projections=apart",
            "values": "values=1",
            "values-split": "values=1,split=2",
            "values-noise": "values=1,noise=1e-6",
        },
    ),
    (
        2,
        {
            "full2": "steps=6,save=two@3",
            "full2-fsdp": "steps=6,wrap=fsdp2,save=sharded@3",
            "two-from-one": "steps=6,resume=one",
            "fsdp-from-one": "steps=6,resume=one,wrap=fsdp2",
            "two-scheduler": "steps=6,resume=one,plant=scheduler",
            "fsdp-data": "steps=6,resume=one,plant=data,wrap=fsdp2",
            "fsdp-moments": "steps=6,resume=one,plant=moments,wrap=fsdp2",
            "two": "",
            "two-contiguous": "sampler=contiguous",
            "two-shuffled": "sampler=shuffled",
            "two-split2": "split=2,sampler=shuffled",
            "two-repeat": "repeat=1,sampler=contiguous",
            "two-thirteen": "rows=13,sampler=padded",
            "two-filled": "filler=1",
            "two-values": "values=1,sampler=contiguous",
            "two-values-noise": "values=1,noise=1e-6",
        },
    ),
    (1, {"one-from-two": "steps=6,resume=two", "one-from-fsdp": "steps=6,resume=sharded"}),
    (
        4,
        {
            "four-from-two": "steps=6,resume=two",
            "four-from-fsdp": "steps=6,resume=sharded,wrap=fsdp2",
            "four": "sampler=contiguous",
        },
    ),
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with every case's trace under its name."""
    folder = tmp_path_factory.mktemp("aligned")
    for ranks, cases in LAUNCHES:
        command = harness.on_ranks(ranks, SCRIPT, folder, *(f"{n}:{text}" for n, text in cases.items()))
        done = harness.run(command)
        assert done.exit_code == 0, done.errors
    return folder


def diff(traces: Path, a: str, b: str, **options: Path) -> Diffed:
    """Compare within this process, which is faster than the command."""
    result = compare(traces / a, traces / b, options=CompareOptions(**options))
    return Diffed(0 if result else 1, result)


def assert_equivalent(traces: Path, a: str, b: str, **options: Path) -> Diffed:
    outcome = diff(traces, a, b, **options)
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete, outcome.summary()
    return outcome


def found(traces: Path, a: str, b: str) -> tuple[Diffed, tuple[object, ...], str]:
    """Return the outcome of a pair that must diverge: where first (step, kind, name, slot), and the cause."""
    outcome = diff(traces, a, b)
    first = outcome.result.first_divergent
    assert outcome.exit_code == 1, outcome.summary()
    assert first is not None, outcome.summary()
    assert outcome.result.causes, outcome.summary()
    where = first.where
    return outcome, (where.step, where.kind, where.name, where.slot), outcome.result.causes[0].code


RESUMED = (
    ("full1", "resumed"),
    ("full1", "two-from-one"),
    ("full1", "fsdp-from-one"),
    ("full2", "one-from-two"),
    ("full2-fsdp", "one-from-fsdp"),
    ("full2", "four-from-two"),
    ("full2-fsdp", "four-from-fsdp"),
    ("dropout", "dropout-resumed"),
)


@pytest.mark.parametrize(("full", "resumed"), RESUMED)
def test_a_resumed_run_is_equivalent_whatever_the_number_of_ranks(
    traces: Path, full: str, resumed: str
) -> None:
    outcome = assert_equivalent(traces, full, resumed)
    assert outcome.result.step_offset == SAVED
    assert "steps aligned by equal input tokens: b's step 0 is a's step 3" in outcome.result.notes


def test_a_resumed_run_can_be_the_reference(traces: Path) -> None:
    assert assert_equivalent(traces, "two-from-one", "full1").result.step_offset == -SAVED


@pytest.mark.parametrize("plant", ["moments", "fsdp-moments"])
def test_lost_moments_are_named_at_the_start(traces: Path, plant: str) -> None:
    _, where, code = found(traces, "full1", plant)
    assert where == ("init", "optimizer_state", "blocks.0.attention.out.bias", "exp_avg")
    assert code == "optimizer.lost_moment"


def test_an_optimizer_that_was_not_restored_is_named_at_the_start(traces: Path) -> None:
    _, where, code = found(traces, "full1", "optimizer")
    assert where[:2] == ("init", "optimizer_state")
    assert code == "optimizer.lost_moment"


def test_a_counter_that_starts_anew_is_named_at_the_start(traces: Path) -> None:
    outcome, where, code = found(traces, "full1", "counter")
    assert where == ("init", "optimizer_state", "blocks.0.attention.out.bias", "step")
    assert code == "optimizer.step_counter"
    assert outcome.result.causes[0].number == -SAVED


@pytest.mark.parametrize("plant", ["scheduler", "two-scheduler"])
def test_a_scheduler_that_starts_anew_is_named_and_both_alignments_are_shown(
    traces: Path, plant: str
) -> None:
    outcome, where, code = found(traces, "full1", plant)
    assert where == (SAVED, "schedule", "scheduler.0", "position")
    assert code == "schedule.position"
    assert outcome.result.causes[0].number == -SAVED
    notes = "\n".join(outcome.result.notes)
    assert "steps aligned by equal input tokens: b's step 0 is a's step 3" in notes
    assert "by it b's step 0 is a's step 0 (--align b:0=a:0)" in notes


@pytest.mark.parametrize("plant", ["data", "fsdp-data"])
def test_data_that_start_anew_are_named_where_they_are_read(traces: Path, plant: str) -> None:
    outcome, where, code = found(traces, "full1", plant)
    assert where[:2] == (SAVED, "input")
    assert code == "input.order"
    assert "8 of 8 rows of b are a's of step 0" in outcome.result.causes[0].text
    notes = "\n".join(outcome.result.notes)
    assert "aligned by the state that the runs start from: b's step 0 is a's step 3" in notes
    assert "by equal input tokens b's step 0 is a's step 0 (--align b:0=a:0)" in notes


def test_a_generator_that_was_not_restored_is_named_at_the_first_dropout(traces: Path) -> None:
    outcome, where, code = found(traces, "dropout", "dropout-generator")
    assert where == (SAVED, "activation", "blocks.0.dropout", "out")
    assert code == "rng.differs"
    assert "the generator of rank 0 (cpu) stood elsewhere" in outcome.result.causes[0].text


SAME = (
    ("plain", "split2"),
    ("plain", "split4"),
    ("split4", "split2"),
    ("two", "split4"),
    ("two", "two-split2"),
    ("plain", "two-contiguous"),
    ("plain", "two-shuffled"),
    ("two-contiguous", "two-shuffled"),
    ("split4", "four"),
    ("repeat", "two-repeat"),
    ("plain", "long"),
    ("plain", "filled"),
    ("filled", "two-filled"),
    ("two-filled", "split2"),
    ("plain", "attention"),
    ("two", "attention"),
    ("plain", "norm"),
    ("plain", "loss"),
    ("loss", "two"),
    ("loss-filled", "split2"),
    ("plain", "fused"),
    ("plain", "loop"),
    ("loop", "fused"),
    ("values", "values-split"),
    ("values", "two-values"),
)


@pytest.mark.parametrize(("a", "b"), SAME)
def test_what_is_cut_padded_or_written_otherwise_is_equivalent(traces: Path, a: str, b: str) -> None:
    assert_equivalent(traces, a, b)


def test_one_fused_projection_and_three_are_equivalent_under_a_layout_file(traces: Path) -> None:
    assert_equivalent(traces, "apart", "plain", layout_b=APART)
    assert_equivalent(traces, "plain", "apart", layout_a=APART)


@pytest.mark.parametrize(
    ("a", "b", "rows", "of"), [("thirteen", "two-thirteen", 2, 14), ("plain", "two-repeat", 2, 8)]
)
def test_rows_that_two_ranks_were_given_are_told_as_such(
    traces: Path, a: str, b: str, rows: int, of: int
) -> None:
    # DistributedSampler fills 13 samples up to 14: sample 0 is on both ranks. In the other pair b alone
    # has its first row twice.
    outcome, where, code = found(traces, a, b)
    assert where[:2] == (0, "input")
    assert code == "input.duplicated_across_ranks"
    assert outcome.result.causes[0].number == rows
    assert f"({rows} of {of})" in outcome.result.headline
    assert {o.where.kind for o in outcome.result.origins} == {"input"}


@pytest.mark.parametrize("b", ["values-noise", "two-values-noise"])
def test_float_rows_that_are_not_the_same_bits_are_paired_by_order_and_it_is_said(
    traces: Path, b: str
) -> None:
    outcome, where, code = found(traces, "values", b)
    assert where == (0, "input", "(root)", "in.0")
    assert code == "input.different"
    assert "some rows did not match by content and were paired by order" in outcome.result.notes
