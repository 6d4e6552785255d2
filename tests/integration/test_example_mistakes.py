"""Each mistake that the example can plant is named: where it acts first, its cause, its number.

Every expectation is derived by hand from what the mistake does, beside its test.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tensortrace.diff.result import Finding
from tests import harness
from tests.conftest import RecordExample
from tests.harness import Diffed

STEPS = ("--steps", 3)
TWO = (*STEPS, "--accumulate", 2)


def example() -> ModuleType:
    """Load the example as a module, for its documents."""
    spec = importlib.util.spec_from_file_location("train_gpt_example", harness.EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def first_documents() -> list[int]:
    """Return the number of valid tokens of each document of step 0: one less than its bytes."""
    return [len(document) - 1 for document in example().read_documents(64)[:8]]


def divergence(a: Path, b: Path) -> tuple[Diffed, Finding]:
    """Diff a reference with a planted mistake; it must be found, and everything must have been compared."""
    outcome = harness.diff(a, b)
    assert outcome.exit_code == 1, outcome.summary()
    assert outcome.result.verdict == "divergent", outcome.summary()
    assert outcome.result.first_divergent is not None, outcome.summary()
    return outcome, outcome.result.first_divergent


def where(finding: Finding) -> tuple[object, ...]:
    at = finding.where
    return at.step, at.microbatch, at.kind, at.name, at.slot


def named(finding: Finding) -> tuple[object, ...]:
    """Return where a finding is, its microbatch left out."""
    return finding.where.step, finding.where.kind, finding.where.name, finding.where.slot


def numbers(outcome: Diffed) -> dict[str, float | None]:
    return {cause.code: cause.number for cause in outcome.result.causes}


def said(outcome: Diffed) -> str:
    """Return everything that the headline and its causes say."""
    causes = [text for cause in outcome.result.causes for text in (cause.text, *cause.evidence)]
    first = outcome.result.first_divergent
    assert first is not None
    return "\n".join([outcome.result.headline, first.text, *first.evidence, *causes])


def test_averaged_local_means_are_named_at_the_loss_with_both_weights(recorded: RecordExample) -> None:
    # Rank r holds the documents r, r+2, ...: n_r valid tokens, each of weight 1/n_r, halved by DDP's mean.
    # The reference weighs every token 1/(n_0 + n_1).
    outcome, first = divergence(recorded(1, *STEPS), recorded(2, *STEPS, "--plant", "local-means"))
    assert where(first)[:4] == (0, 0, "loss", "cross_entropy"), outcome.summary()
    assert "scale.token_ratio" in numbers(outcome), outcome.summary()
    tokens = first_documents()
    n = [sum(tokens[0::2]), sum(tokens[1::2])]
    assert n[0] != n[1]
    for denominator in (2 * n[0], 2 * n[1], sum(n)):
        assert f"1/{denominator}" in said(outcome), outcome.summary()


def test_a_loss_four_percent_too_large_is_named_at_the_loss(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(2, *STEPS), recorded(2, *STEPS, "--plant", "loss-scale-4pct"))
    assert where(first)[:3] == (0, 0, "loss"), outcome.summary()
    assert numbers(outcome)["scale.other"] == pytest.approx(1.04, rel=1e-5), outcome.summary()


def test_four_percent_are_found_across_world_sizes_at_the_loss(recorded: RecordExample) -> None:
    # One rank and DDP scale in different places, but DDP's mean over ranks makes no 1.04 of anything.
    outcome, first = divergence(recorded(1, *STEPS), recorded(2, *STEPS, "--plant", "loss-scale-4pct"))
    assert where(first)[0] == 0
    assert first.where.kind == "loss", outcome.summary()
    assert numbers(outcome)["scale.other"] == pytest.approx(1.04, rel=1e-5), outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_missing_factor_of_the_world_size_is_named(recorded: RecordExample, ranks: int) -> None:
    planted = recorded(2, *STEPS, "--plant", "missing-world-factor")
    outcome, first = divergence(recorded(ranks, *STEPS), planted)
    assert first.where.step == 0
    kinds = {1: {"reduced_grad", "clipped_grad"}, 2: {"loss"}}[ranks]
    assert first.where.kind in kinds, outcome.summary()
    assert numbers(outcome)["scale.world_size"] == pytest.approx(0.5, rel=1e-5), outcome.summary()


def test_padding_counted_as_tokens_is_a_factor_at_the_loss(recorded: RecordExample) -> None:
    # On each rank 4 documents are padded to the longest of them: the denominator is 4 (L_0 + L_1).
    outcome, first = divergence(recorded(2, *STEPS), recorded(2, *STEPS, "--plant", "padding-counted"))
    assert where(first)[:3] == (0, 0, "loss"), outcome.summary()
    tokens = first_documents()
    factor = sum(tokens) / (4 * max(tokens[0::2]) + 4 * max(tokens[1::2]))
    found = [number for code, number in numbers(outcome).items() if code.startswith("scale.")]
    assert found == [pytest.approx(factor, rel=1e-5)], outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_wrong_element_is_named_at_the_module_that_made_it(recorded: RecordExample, ranks: int) -> None:
    planted = recorded(ranks, *STEPS, "--plant", "wrong-element")
    outcome, first = divergence(recorded(1, *STEPS), planted)
    assert where(first) == (0, 0, "activation", "blocks.1.mlp", "out"), outcome.summary()


def test_swapped_query_and_key_rows_are_named_at_init(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(1, *STEPS, "--plant", "swapped-block"))
    expected = ("init", None, "param", "blocks.0.attention.qkv.weight", "model")
    assert where(first) == expected, outcome.summary()
    assert numbers(outcome).keys() & {"init.differs", "layout.permuted_blocks"}, outcome.summary()


def test_ranks_that_read_the_same_documents_are_named_at_the_input(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(2, *STEPS, "--plant", "same-documents"))
    assert named(first)[:2] == (0, "input"), outcome.summary()
    assert "input.duplicated_across_ranks" in numbers(outcome), outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_never_zeroed_are_named_when_step_one_opens(
    recorded: RecordExample, ranks: int
) -> None:
    # Step 0 starts from no gradient in both runs; in step 1 only b finds one.
    outcome, first = divergence(recorded(1, *STEPS), recorded(ranks, *STEPS, "--plant", "no-zero-grad"))
    assert where(first)[:3] == (1, None, "local_grad"), outcome.summary()
    assert first.where.slot == "start", outcome.summary()
    assert "grad.not_zeroed" in numbers(outcome), outcome.summary()


def test_gradients_zeroed_between_microbatches_are_named_at_the_reduction(recorded: RecordExample) -> None:
    # What each backward contributes is right; what DDP reduces is the last microbatch's part alone.
    planted = recorded(2, *TWO, "--plant", "zero-grad-per-microbatch")
    outcome, first = divergence(recorded(2, *TWO), planted)
    assert named(first)[:2] == (0, "reduced_grad"), outcome.summary()


def test_gradients_reduced_twice_are_named_at_the_second_reduction(recorded: RecordExample) -> None:
    # DDP's mean is equal on both ranks, so that summing it again over 2 ranks doubles it.
    outcome, first = divergence(recorded(2, *STEPS), recorded(2, *STEPS, "--plant", "double-reduction"))
    assert named(first)[:2] == (0, "reduced_grad"), outcome.summary()
    codes = numbers(outcome).keys() & {"reduction.double", "scale.world_size"}
    assert codes, outcome.summary()
    assert numbers(outcome)[codes.pop()] == pytest.approx(2.0, rel=1e-5), outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_before_the_accumulation_ends_is_the_event_that_only_b_has(
    recorded: RecordExample, ranks: int
) -> None:
    # The reference clips once, after microbatch 1; b clips after microbatch 0 too.
    planted = recorded(ranks, *TWO, "--plant", "clip-per-microbatch")
    outcome, first = divergence(recorded(ranks, *TWO), planted)
    assert where(first)[:3] == (0, 0, "clipped_grad"), outcome.summary()
    assert "clip.before_accumulation" in numbers(outcome), outcome.summary()


def test_clipping_before_unscaling_is_named_with_the_loss_scale(recorded: RecordExample) -> None:
    half = (*STEPS, "--dtype", "fp16", "--loss-scale", 1024)
    outcome, first = divergence(recorded(1, *half), recorded(1, *half, "--plant", "clip-before-unscale"))
    assert named(first)[:2] == (0, "clipped_grad"), outcome.summary()
    assert numbers(outcome)["clip.before_unscale"] == pytest.approx(1024, rel=1e-3), outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clip_that_never_happens_is_named(recorded: RecordExample, ranks: int) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(ranks, *STEPS, "--plant", "no-clip"))
    assert named(first)[:2] == (0, "clipped_grad"), outcome.summary()
    assert "clip.skipped" in numbers(outcome), outcome.summary()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_stepped_per_microbatch_is_named_with_its_position(
    recorded: RecordExample, ranks: int
) -> None:
    # Warm-up over 2 steps: at the update of step 0 the reference stands at 0 (half of lr), b at 1 (all).
    planted = recorded(ranks, *TWO, "--plant", "scheduler-per-microbatch")
    outcome, first = divergence(recorded(1, *TWO), planted)
    assert named(first)[:2] == (0, "schedule"), outcome.summary()
    assert "schedule.position" in numbers(outcome), outcome.summary()


def test_weight_decay_on_the_norms_is_named_at_the_parameter_group(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(2, *STEPS, "--plant", "decay-mixup"))
    assert named(first)[:2] == (0, "schedule"), outcome.summary()
    assert first.where.name.startswith("optimizer.0.group."), outcome.summary()
    assert "optimizer.hyperparameter" in numbers(outcome), outcome.summary()
    assert "norm.weight" in said(outcome)


def test_a_parameter_that_the_optimizer_never_got_is_named(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(1, *STEPS, "--plant", "forgotten-parameter"))
    assert named(first)[:2] == (0, "schedule"), outcome.summary()
    assert numbers(outcome).keys() & {"optimizer.param_missing", "value.not_updated"}, outcome.summary()
    assert "position.weight" in said(outcome)


def test_a_learning_rate_of_twice_the_value_is_named(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(2, *STEPS, "--lr", 2e-3))
    assert (first.where.step, first.where.kind, first.where.slot) == (0, "schedule", "lr"), outcome.summary()
    assert "optimizer.hyperparameter" in numbers(outcome), outcome.summary()


def test_another_seed_is_named_at_init(recorded: RecordExample) -> None:
    outcome, first = divergence(recorded(1, *STEPS), recorded(1, *STEPS, "--seed", 1))
    assert named(first)[:2] == ("init", "param"), outcome.summary()
    assert "init.differs" in numbers(outcome), outcome.summary()


def test_first_moments_lost_on_resume_are_named_at_init(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint.pt"
    trained = harness.run(harness.python(harness.EXAMPLE, *STEPS, "--save", saved))
    assert trained.exit_code == 0, trained.errors
    resume = (*STEPS, "--resume", saved)
    a = harness.record(tmp_path / "a", harness.python(harness.EXAMPLE, *resume))
    lost = harness.python(harness.EXAMPLE, *resume, "--plant", "lost-momentum")
    outcome, first = divergence(a, harness.record(tmp_path / "b", lost))
    assert (first.where.step, first.where.kind, first.where.slot) == ("init", "optimizer_state", "exp_avg")
    assert "optimizer.lost_moment" in numbers(outcome), outcome.summary()


def test_every_mistake_that_the_example_plants_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in example().PLANTS if f'"{name}"' not in text] == []
