"""Gradients that are dropped: of passes that only look ahead, of networks that are not trained in a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, place
from tests.simulated import At, Documents, Program


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class LookingAhead(Program):
    """Goes through half of the rows first, drops their gradients, and goes through all (accumulate=2)."""

    def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
        own = documents[rank :: self.setup.ranks]
        return own if microbatch else own[: len(own) // 2]

    def forgets(self, step: int, microbatch: int) -> bool:
        return microbatch == 0

    def clips_after(self, step: int, microbatch: int) -> bool:
        return False


class Reduced(LookingAhead):
    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        wrong = at.kind is Kind.REDUCED_GRAD and at.name == "head.weight" and at.step == 1
        return value * np.float32(1.001) if wrong and at.microbatch != 0 else value


class Keeping(LookingAhead):
    def forgets(self, step: int, microbatch: int) -> bool:
        return False


def test_dropped_gradients_are_no_part_of_what_is_consumed(judge: Judge) -> None:
    assert_equivalent(judge(LookingAhead(accumulate=2), LookingAhead(accumulate=2, ranks=2)))


def test_a_mistake_in_what_is_kept_is_found(judge: Judge) -> None:
    result = judge(LookingAhead(accumulate=2), Reduced(accumulate=2, ranks=2))
    assert place(result)[0::2] == (1, Kind.REDUCED_GRAD, "grad")
    assert place(result)[3] == "head.weight"


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_only_one_run_drops_are_found(judge: Judge, ranks: int) -> None:
    for programs in ((LookingAhead, Keeping), (Keeping, LookingAhead)):
        a, b = programs[0](accumulate=2), programs[1](accumulate=2, ranks=ranks)
        assert place(judge(a, b))[0] == 0


class Untrained(Program):
    """Trains all but the head's bias in step 1; ``frozen`` is that it then has no gradient either."""

    frozen = False

    def updates(self, step: int, rank: int, name: str) -> bool:
        return not (step == 1 and name == "head.bias")

    def keeps(self, at: At) -> bool:
        if (at.step, at.name) != (1, "head.bias"):
            return True
        return at.kind not in (Kind.CLIPPED_GRAD, Kind.LOCAL_GRAD) or (
            at.kind is Kind.LOCAL_GRAD and not self.frozen
        )


class Frozen(Untrained):
    frozen = True


class FrozenWrongly(Program):
    def keeps(self, at: At) -> bool:
        return (at.step, at.name, at.kind) != (1, "head.bias", Kind.LOCAL_GRAD)


def test_a_gradient_that_no_optimizer_is_given_may_be_missing(judge: Judge) -> None:
    result = judge(Untrained(), Frozen())
    assert result.verdict == "equivalent", result.headline
    assert judge(Frozen(), Untrained()).verdict == "equivalent"


def test_a_gradient_that_an_optimizer_is_given_may_not(judge: Judge) -> None:
    assert judge(Program(), FrozenWrongly()).verdict != "equivalent"
    assert judge(Program(), Frozen()).verdict != "equivalent"
