"""Styles of training code other than the example's: correct ones are equivalent on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness

SCRIPT = Path(__file__).parents[1] / "training" / "styles.py"
Recorded = Callable[..., Path]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a function that records the script once per number of ranks and arguments."""
    folder, traces = tmp_path_factory.mktemp("styles"), {}

    def record(ranks: int, *arguments: str) -> Path:
        key = (ranks, *arguments)
        if key not in traces:
            command = harness.on_ranks(ranks, SCRIPT, *arguments)
            traces[key] = harness.record(folder / f"trace{len(traces)}", command)
        return traces[key]

    return record


@pytest.mark.parametrize("style", ["criterion", "causal", "masked", "recurrent"])
def test_one_rank_and_two_are_equivalent(ran: Recorded, style: str) -> None:
    outcome = harness.diff(ran(1, style), ran(2, style))
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete


def test_a_missing_factor_of_the_world_size_is_named_though_the_model_returns_its_loss(ran: Recorded) -> None:
    outcome = harness.diff(ran(1, "causal"), ran(2, "causal", "no-world"))
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    assert (first.where.step, first.where.kind) == (0, "reduced_grad")
    assert cause.code == "scale.world_size"
    assert cause.number == pytest.approx(0.5, rel=1e-5)


def test_local_means_through_a_mask_are_named_with_the_tokens_that_the_mask_leaves(ran: Recorded) -> None:
    outcome = harness.diff(ran(1, "masked"), ran(2, "masked", "local-means"))
    first, cause = outcome.result.first_divergent, outcome.result.causes[0]
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.slot) == (0, "loss", "weight")
    assert cause.code == "scale.token_ratio"


def test_tokens_of_different_weights_are_equivalent_on_one_rank_and_two(ran: Recorded) -> None:
    outcome = harness.diff(ran(1, "masked", "weighted"), ran(2, "masked", "weighted"))
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete
    assert not any("not observed" in note for note in outcome.result.notes)


@pytest.mark.parametrize(
    ("a", "b"), [("", "no-mask"), ("weighted", "other-weighted")], ids=["mask-left-out", "other-weights"]
)
def test_tokens_that_weigh_otherwise_are_told_at_the_loss(ran: Recorded, a: str, b: str) -> None:
    for ranks in (1, 2):
        outcome = harness.diff(ran(1, "masked", *filter(None, [a])), ran(ranks, "masked", b))
        first = outcome.result.first_divergent
        assert first is not None
        assert (first.where.step, first.where.kind, first.where.slot) == (0, "loss", "weight")
