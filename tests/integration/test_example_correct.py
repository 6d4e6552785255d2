"""Two correct runs of the example are equivalent, however their work was split."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.conftest import RecordExample


def assert_equivalent(a: Path, b: Path, *options: str) -> None:
    outcome = harness.diff(a, b, *options)
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.verdict == "equivalent"
    assert outcome.result.first_divergent is None
    assert outcome.result.origins == ()
    assert outcome.result.causes == ()
    assert outcome.result.coverage.complete
    assert outcome.result.coverage.compared > 1000


def test_one_rank_and_two_ranks_are_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1), recorded(2))


def test_two_ranks_and_one_rank_are_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(2), recorded(1))


def test_one_microbatch_of_eight_and_four_of_two_are_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1), recorded(1, "--accumulate", 4))


def test_four_microbatches_on_one_rank_and_one_on_each_of_four_are_equivalent(
    recorded: RecordExample,
) -> None:
    assert_equivalent(recorded(1, "--accumulate", 4), recorded(4))


def test_uneven_microbatches_on_two_ranks_are_equivalent_to_one_rank(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1), recorded(2, "--accumulate", 3))


def test_reducing_after_each_microbatch_is_equivalent_to_reducing_once(recorded: RecordExample) -> None:
    assert_equivalent(recorded(2, "--accumulate", 3), recorded(2, "--accumulate", 3, "--sync-every"))


def test_foreach_and_single_tensor_adamw_are_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1, "--foreach"), recorded(1, "--single"))


def test_foreach_and_fused_adamw_are_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1, "--foreach"), recorded(1, "--fused"))


def test_dividing_by_the_accumulation_inside_or_outside_backward_is_equivalent(
    recorded: RecordExample,
) -> None:
    inside = recorded(1, "--accumulate", 4)
    assert_equivalent(inside, recorded(1, "--accumulate", 4, "--average", "gradient"))


def test_dividing_by_an_odd_accumulation_outside_backward_is_equivalent_on_two_ranks(
    recorded: RecordExample,
) -> None:
    inside = recorded(2, "--accumulate", 3)
    assert_equivalent(inside, recorded(2, "--accumulate", 3, "--average", "gradient"))


def test_fp32_and_bf16_raise_no_alarm(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1), recorded(1, "--dtype", "bf16"))


def test_fp32_and_fp16_with_a_loss_scale_raise_no_alarm(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1), recorded(1, "--dtype", "fp16", "--loss-scale", 1024))


def test_eval_passes_do_not_disturb_the_steps_around_them(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1, "--eval-every", 2), recorded(2, "--eval-every", 2))


def test_a_run_repeated_is_equal_bit_for_bit(tmp_path: Path) -> None:
    command = harness.python(harness.EXAMPLE, "--dropout", 0.1, "--accumulate", 2)
    first, second = harness.record(tmp_path / "a", command), harness.record(tmp_path / "b", command)
    outcome = harness.diff(first, second, "--exact")
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.bitwise_equal == outcome.result.coverage.compared


@pytest.mark.slow
def test_twenty_steps_on_one_rank_and_two_stay_equivalent(recorded: RecordExample) -> None:
    assert_equivalent(recorded(1, "--steps", 20), recorded(2, "--steps", 20))
