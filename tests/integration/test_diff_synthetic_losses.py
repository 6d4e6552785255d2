"""Losses that two programs compute in other ways: one unknown, a part of one, labels cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import Judge, assert_equivalent, codes, first, judge_in, place
from tests.simulated import IGNORE, At, Program


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

    by_hand, term, total, weight, added = False, "mse_loss", 8.0, 0.5, 4.0

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.kind, at.name) != (Kind.LOSS, "backward"):
            return super()._put(at, value, **fields)
        if not self.by_hand:
            meta = Meta(reduction="sum", denominator=1.0)
            told: dict[str, Any] = {"sum": self.total, "value": self.total, "count": np.int64(4)}
            for slot, number in (told | {"weight": self.weight}).items():
                own = {"meta": meta, "shard": fields.get("shard")}
                super()._put(at._replace(name=self.term, slot=slot), number, **own)
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


class Masked(Program):
    """Asks for the loss of each token, padding included, and multiplies it by a mask."""

    def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
        return np.asarray(targets != IGNORE, dtype=np.float64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mask_behind_the_loss_is_the_same_as_labels_that_are_ignored(judge: Judge, ranks: int) -> None:
    assert_equivalent(judge(Program(), Masked(ranks=ranks)))
    assert_equivalent(judge(Masked(), Program(ranks=ranks, accumulate=2)))
    assert_equivalent(judge(Masked(ranks=ranks), Masked()))


@pytest.mark.parametrize("reference", [Program, Masked])
def test_a_mask_that_is_forgotten_counts_padding(judge: Judge, reference: type[Program]) -> None:
    class Forgotten(Masked):
        def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
            mask = super().mask(at, targets)
            return mask if at.step != 1 or mask is None else np.ones_like(mask)

    result = judge(reference(), Forgotten())
    # where both ask for every term, the function counts alike in both: the mask enters behind it, as a weight
    slot = "count" if reference is Program else "weight"
    assert place(result) == (1, 0, "loss", "cross_entropy", slot)
    assert codes(result)[0] == "mask.padding_leak"


@pytest.mark.parametrize("reference", [Program, Masked])
def test_a_mask_that_is_shifted_by_one_takes_other_labels(judge: Judge, reference: type[Program]) -> None:
    class Shifted(Masked):
        def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
            mask = super().mask(at, targets)
            return mask if at.step != 1 or mask is None else np.roll(mask, 1)

    assert place(judge(reference(), Shifted()))[:4] == (1, 0, "loss", "cross_entropy")


@pytest.mark.parametrize("reference", [Program, Masked])
def test_a_mean_over_what_is_masked_too_weighs_less(judge: Judge, reference: type[Program]) -> None:
    class Diluted(Masked):
        def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
            return 0.75 * super().token_weight(counts, rank, microbatch)

    result = judge(reference(), Diluted())
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert first(result).metrics is not None
    assert codes(result)[0].startswith("scale.")


class Penalised(Program):
    """Adds a penalty to its objective that no loss function computes: a hundredth of the squared scores."""

    coefficient = 0.01

    def run(self) -> list[list[Any]]:
        self.scores: np.ndarray = np.zeros(1)
        return super().run()

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if at.microbatch is None:
            return value
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "(root)", "out"):
            self.scores = value
        penalty = np.float32(self.of_step(at.step))
        if (at.kind, at.name) == (Kind.LOSS, "backward"):
            return np.asarray(value + penalty * np.float32(np.square(self.scores).mean()))
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "(root)", "out"):
            return np.asarray(value + 2 * penalty * self.scores / np.float32(self.scores.size))
        return value

    def of_step(self, step: int) -> float:
        return self.coefficient


def test_another_coefficient_of_a_term_is_told_where_backward_starts(judge: Judge) -> None:
    class Later(Penalised):
        def of_step(self, step: int) -> float:
            return 1.01 * self.coefficient if step == 1 else self.coefficient

    assert_equivalent(judge(Penalised(), Penalised(order=1)))
    result = judge(Penalised(), Later(order=1))
    assert place(result) == (1, 0, "loss", "backward", "value")
    assert not any(o.where.kind == "activation_grad" and o.where.step == 1 for o in result.origins)
    assert place(judge(Penalised(), Program()))[1:] == (0, "loss", "backward", "value")


def test_a_number_without_a_gradient_may_be_added_to_an_objective(judge: Judge) -> None:
    class Shifted(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            return value + np.float32(1) if (at.kind, at.name) == (Kind.LOSS, "backward") else value

    assert_equivalent(judge(Program(), Shifted()))


def test_a_wrong_gradient_of_an_equal_objective_stays_where_it_is(judge: Judge) -> None:
    class Wrong(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            wrong = (at.step, at.kind, at.name, at.slot) == (1, Kind.ACTIVATION_GRAD, "act", "out")
            return 1.001 * value if wrong else value

    assert place(judge(Program(), Wrong())) == (1, 0, "activation_grad", "act", "out")
    assert place(judge(Program(order=1), Wrong())) == (1, 0, "activation_grad", "act", "out")


class Renamed(TwoTerms):
    """Computes the second term by another function, of other settings: 16 by a weight of a quarter."""

    term, total, weight = "huber_loss", 16.0, 0.25


def test_a_term_by_another_function_is_judged_by_its_gradients(judge: Judge) -> None:
    for result in (judge(TwoTerms(), Renamed()), judge(Renamed(ranks=2), TwoTerms(ranks=2))):
        assert result.verdict == "equivalent", result.headline
        assert any("not recognised" in missing.reason for missing in result.coverage.missing)


def test_another_function_that_is_another_part_of_the_objective_is_a_gap(judge: Judge) -> None:
    class Greater(Renamed):
        total, added = 24.0, 6.0

    assert judge(TwoTerms(), Greater()).verdict == "incomplete"


class Outside(Masked):
    """Multiplies each token's loss by 1 or 2, after its label, beside the mask."""

    def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
        return np.where(targets != IGNORE, 1.0 + targets % 2, 0.0)


class Inside(Outside):
    """Gives these numbers to the loss function as weights of classes."""

    factor = 1.0

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if at.name != "cross_entropy":
            return super()._put(at, value, **fields)
        fields["meta"] = Meta(reduction="sum", ignore_index=IGNORE, denominator=1.0)
        told = np.asarray(value)
        if at.slot == "target":
            self.labels = told
        if at.slot == "value":
            told = self.losses = np.asarray(value, np.float64)
        if at.slot == "weight":  # known last: the sum is told then
            weight = np.asarray(value)
            valid = weight != 0
            unit = weight[valid].min()
            total = float((self.losses * weight / unit).sum()) * self.factor
            super()._put(at._replace(slot="sum"), np.float64(total), **fields)
            super()._put(at._replace(slot="count"), np.int64(valid.sum()), **fields)
            labels = np.where(valid, self.labels, IGNORE)
            super()._put(at._replace(slot="target"), labels, **fields)
            super()._put(at, unit, **fields)
        return value


@pytest.mark.parametrize("order", [(Inside, Outside), (Outside, Inside)])
def test_terms_may_be_weighed_inside_a_loss_or_outside(
    judge: Judge, order: tuple[type[Program], type[Program]]
) -> None:
    a, b = order
    for settings in ({}, {"ranks": 2}, {"accumulate": 2}):
        result = judge(a(**settings), b(**settings))
        assert result.verdict == "equivalent", result.headline
        assert any("multiplies by it" in missing.reason for missing in result.coverage.missing)


def test_other_weights_outside_a_loss_than_inside_are_found(judge: Judge) -> None:
    class Wrong(Outside):
        def mask(self, at: At, targets: np.ndarray) -> np.ndarray | None:
            mask = super().mask(at, targets)
            return mask if at.step != 1 or mask is None else np.where(targets == 5, 1.5, mask)

    assert place(judge(Inside(), Wrong())) == (1, 0, "loss", "cross_entropy", "sum")
