"""Losses that two programs compute in other ways: one unknown, a part of one, labels cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import Judge, judge_in, place
from tests.simulated import At, Program


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Unknown(Program):
    """Computes its loss in a way of its own: nothing but the root of its backward pass is seen."""

    def keeps(self, at: At) -> bool:
        return at.kind is not Kind.LOSS or at.name == "backward"


class Smoothed(Program):
    """Uses log-probabilities beside the gathered ones, too: those have 0.9 of the weight and another sum."""

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if at.name != "cross_entropy":
            return super()._put(at, value, **fields)
        if at.slot in ("target", "value"):
            return value
        meta = replace(fields.pop("meta") or Meta(), op="part")
        factor = {"weight": 0.9, "sum": 1.1}.get(at.slot)
        told = value if factor is None else value * factor
        super()._put(at._replace(name="log_softmax.gather"), told, meta=meta, **fields)
        return value


class Chunked(Program):
    """Gives the loss five labels at first, then the others."""

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.name, at.slot) != ("cross_entropy", "target"):
            return super()._put(at, value, **fields)
        parts = np.split(np.asarray(value), [5])
        put = super()._put
        return np.concatenate([put(at, part, **fields, call=n) for n, part in enumerate(parts)])


@pytest.mark.parametrize("other", [Unknown, Smoothed])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_ones_own_is_judged_by_its_gradients(
    judge: Judge, other: type[Program], ranks: int
) -> None:
    for result in (judge(Program(), other(ranks=ranks)), judge(other(ranks=ranks), Program())):
        assert result.verdict == "equivalent", result.headline
        assert any("not recognised" in missing.reason for missing in result.coverage.missing)


@pytest.mark.parametrize("other", [Unknown, Smoothed])
def test_a_loss_of_ones_own_that_is_wrong_is_found_in_its_gradient(
    judge: Judge, other: type[Program]
) -> None:
    class Wrong(other):  # type: ignore[misc, valid-type]
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            wrong = at.kind is Kind.ACTIVATION_GRAD and (at.name, at.slot) == ("(root)", "out")
            return value + 0.01 * np.abs(value) if wrong else value

    assert place(judge(Program(), Wrong()))[2] == "activation_grad"


def test_labels_are_the_same_however_they_are_cut(judge: Judge) -> None:
    assert judge(Program(), Chunked()).verdict == "equivalent"
    assert judge(Chunked(), Program(ranks=2)).verdict == "equivalent"


def test_a_wrong_label_in_a_chunk_is_found(judge: Judge) -> None:
    class Wrong(Chunked):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            first = (at.step, at.slot) == (1, "target") and len(value) == 5
            return np.where(np.arange(len(value)) == 2, (value + 1) % 23, value) if first else value

    assert place(judge(Program(), Wrong())) == (1, 0, "loss", "cross_entropy", "target")


class Twice(Program):
    """Goes backward twice: a quarter of every gradient comes from the first pass."""

    shares = (0.25, 0.75)

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if at.kind is not Kind.ACTIVATION_GRAD:
            return super()._put(at, value, **fields)
        for call, part in enumerate(self.shares):
            super()._put(at, np.float32(part) * value, **fields, call=call)
        return value


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_several_backward_passes_add_up(judge: Judge, ranks: int) -> None:
    assert judge(Program(), Twice(ranks=ranks)).verdict == "equivalent"
    assert judge(Twice(ranks=ranks), Program()).verdict == "equivalent"
    assert judge(Twice(ranks=ranks), Twice()).verdict == "equivalent"


def test_a_backward_pass_that_adds_too_little_is_found(judge: Judge) -> None:
    class Less(Twice):
        shares = (0.25, 0.7)

    assert place(judge(Program(), Less()))[2] == "activation_grad"


class TwoTerms(Program):
    """Adds half of a squared error of 8 to its objective, by a function that is recognised."""

    by_hand, added = False, 0.5 * 8.0

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.kind, at.name) != (Kind.LOSS, "backward"):
            return super()._put(at, value, **fields)
        if not self.by_hand:
            meta = Meta(reduction="sum", denominator=1.0)
            told: dict[str, Any] = {"sum": 8.0, "value": 8.0, "count": np.int64(4), "weight": 0.5}
            for slot, number in told.items():
                own = {"meta": meta, "shard": fields.get("shard")}
                super()._put(at._replace(name="mse_loss", slot=slot), number, **own)
        return super()._put(at, np.asarray(value + self.added), **fields)


class OneByHand(TwoTerms):
    by_hand = True


class OneForgotten(OneByHand):
    added = 0.0


def test_a_term_by_hand_beside_a_recognised_one_is_judged_by_its_gradients(judge: Judge) -> None:
    for result in (judge(TwoTerms(), OneByHand(order=1)), judge(OneByHand(), TwoTerms(order=1))):
        assert result.verdict == "equivalent", result.headline
        assert any("not recognised" in missing.reason for missing in result.coverage.missing)
        assert any(b.where.name == "cross_entropy" and b.where.slot == "weight" for b in result.boundaries)


def test_a_term_that_a_run_forgets_is_not_excused(judge: Judge) -> None:
    assert judge(TwoTerms(), OneForgotten(order=1)).verdict != "equivalent"
