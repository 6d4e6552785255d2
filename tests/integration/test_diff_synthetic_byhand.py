"""Clipping that programs write by hand: no function is seen to clip, and no coefficient is recorded.

The norm of a correct program's gradients is well above the limit of 0.1, so that every step clips.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensortrace.diff.gradients import CLIP
from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import Judge, codes, first, origins, place
from tests.simulated import NAMES, Arrays, At, Program

GROUPS = (("embed.weight", "hidden.weight", "head.weight"), ("hidden.bias", "head.bias"))
HALF = np.float32(0.5)


class ByHand(Program):
    """Clips by the norm of all gradients, between its reduction and its optimizer."""

    def together(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameters that are clipped together."""
        return (NAMES,)

    def amiss(self, step: int, rank: int, grads: Arrays) -> Arrays:
        """Return the gradients that are clipped; mistakes make others of them."""
        return grads

    def norm(self, rank: int, found: list[np.ndarray]) -> float:
        """Return the norm that is clipped by."""
        return float(np.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in found)))

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        for rank, held in enumerate(self.grads):
            grads = self.amiss(step, rank, dict(held))
            for members in self.together():
                total = self.norm(rank, [grads[name] for name in members])
                factor = np.float32(min(1.0, self.setup.max_norm / (total + 1e-6)))
                for name in members:
                    self.grads[rank][name] = grads[name] * factor


class InGroups(ByHand):
    """Clips weights by their norm, and biases by theirs."""

    def together(self) -> tuple[tuple[str, ...], ...]:
        return GROUPS


class OneByOne(ByHand):
    """Clips each gradient by its own norm."""

    def together(self) -> tuple[tuple[str, ...], ...]:
        return tuple((name,) for name in NAMES)


class ByValue(ByHand):
    """Cuts elements off at 0.02."""

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        for held in self.grads:
            held.update({name: np.clip(g, -0.02, 0.02) for name, g in held.items()})


class SumThenMean(ByHand):
    """Ranks add up what their own parts of the mean give."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 1 / sum(counts.values())

    def reductions(self, name: str) -> tuple[str, ...]:
        return ("sum",) if self.setup.ranks > 1 else ()


class LateDivision(ByHand):
    """The loss of each rank is a mean as if it were alone; gradients are added up and divided at the end."""

    def reductions(self, name: str) -> tuple[str, ...]:
        return ("sum",) if self.setup.ranks > 1 else ()

    def amiss(self, step: int, rank: int, grads: Arrays) -> Arrays:
        return {name: g / np.float32(self.setup.ranks) for name, g in grads.items()}


class SumOfTokens(ByHand):
    """The loss is a sum, and gradients are divided by the number of tokens at the end."""

    tokens = 1

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        self.tokens = sum(counts.values())
        return self.setup.ranks

    def amiss(self, step: int, rank: int, grads: Arrays) -> Arrays:
        return {name: g / np.float32(self.tokens) for name, g in grads.items()}


class WrongLoss(ByHand):
    """The loss is divided by more tokens than there are."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 0.73 * super().token_weight(counts, rank, microbatch)


class OneHalved(ByHand):
    """One gradient is halved before all are clipped."""

    def amiss(self, step: int, rank: int, grads: Arrays) -> Arrays:
        return grads | {"hidden.weight": grads["hidden.weight"] * HALF}


class OneOther(ByHand):
    """One gradient is another from the start, and too small to change the norm."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        return _round_off(at, value, 5)


class SoInReference(Program):
    """The same gradient in a program that calls the function that clips."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        return _round_off(at, value, 6)


def _round_off(at: At, value: np.ndarray, seed: int) -> np.ndarray:
    if at.name == "hidden.bias" and at.kind in (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD) and at.slot == "grad":
        return np.random.default_rng([seed, at.step]).normal(scale=1e-9, size=value.shape).astype(value.dtype)
    return value


class HalvedInGroups(InGroups, OneHalved):
    """The same where weights and biases are clipped apart."""


class Unreduced(ByHand):
    """One gradient is not reduced, so that each rank has a norm of its own and clips all by it."""

    def reductions(self, name: str) -> tuple[str, ...]:
        return () if name == "hidden.weight" else super().reductions(name)  # type: ignore[return-value]


class TwiceTheNorm(ByHand):
    """Counts every gradient twice in the norm."""

    def norm(self, rank: int, found: list[np.ndarray]) -> float:
        return super().norm(rank, [*found, *found])


LEGAL = [
    (ByHand, {}, ByHand, {"accumulate": 2}),
    (ByHand, {}, ByHand, {"ranks": 2}),
    (ByHand, {"ranks": 2}, ByHand, {"ranks": 4}),
    (ByHand, {}, Program, {}),
    (Program, {}, ByHand, {"ranks": 2}),
    (ByHand, {}, SumThenMean, {"ranks": 2}),
    (ByHand, {}, LateDivision, {"ranks": 2}),
    (SumThenMean, {"ranks": 2}, LateDivision, {"ranks": 2, "accumulate": 2}),
    (ByHand, {}, SumOfTokens, {}),
    (ByHand, {}, SumOfTokens, {"ranks": 2}),
    (InGroups, {}, InGroups, {"ranks": 2}),
    (OneByOne, {}, OneByOne, {"ranks": 2}),
    (ByValue, {}, ByValue, {"ranks": 2}),
    (ByHand, {"max_norm": 100.0}, LateDivision, {"ranks": 2, "max_norm": 100.0}),
    (ByHand, {"max_norm": 0.4}, ByHand, {"ranks": 2, "max_norm": 0.4, "accumulate": 2}),
]


@pytest.mark.parametrize(("a", "of_a", "b", "of_b"), LEGAL)
def test_correct_programs_that_clip_by_hand_agree(
    judge: Judge, a: type[Program], of_a: dict[str, Any], b: type[Program], of_b: dict[str, Any]
) -> None:
    result = judge(a(**of_a), b(order=5, **of_b))
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_loss_is_not_excused_by_the_clip_that_undoes_it(judge: Judge, ranks: int) -> None:
    result = judge(ByHand(ranks=ranks), WrongLoss(ranks=ranks))
    assert place(result) == (0, 0, Kind.LOSS.value, "cross_entropy", "weight")
    assert codes(result)[:1] == ["scale.other"]
    assert result.causes[0].number == pytest.approx(0.73, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("right", "wrong"), [(ByHand, OneHalved), (InGroups, HalvedInGroups)])
def test_one_wrong_gradient_is_named_and_not_those_that_the_norm_scales(
    judge: Judge, right: type[Program], wrong: type[Program], ranks: int
) -> None:
    result = judge(right(), wrong(ranks=ranks))
    assert place(result) == (0, None, Kind.CLIPPED_GRAD.value, "hidden.weight", "grad")
    assert {o.where.name for o in result.origins if o.where.step == 0} == {"hidden.weight"}
    assert result.causes[0].number == pytest.approx(0.5, rel=1e-5)


class WeightsAlone(Program):
    """Calls the function that clips, but with the weights alone: biases are not clipped."""

    given = GROUPS[0]

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        held = [{n: g.pop(n) for n in NAMES if n not in self.given} for g in self.grads]
        super()._clip(step, microbatch, call)
        for grads, others in zip(self.grads, held, strict=True):
            grads.update(others)

    def _scalar(self, step: int, rank: int, microbatch: int, slot: str, value: float, call: int) -> float:
        at = At(step, rank, microbatch, Kind.CLIPPED_GRAD, CLIP, slot)
        meta = Meta(members=self.given, op="clip_grad_norm_")
        return float(self._put(at, np.float64(value), call=call, meta=meta))


def test_a_clip_that_is_given_some_parameters_says_which_it_lacks(judge: Judge) -> None:
    result = judge(Program(), WeightsAlone())
    assert place(result)[2:] == (Kind.CLIPPED_GRAD.value, CLIP, "total_norm")
    assert codes(result)[0] == "clip.wrong_norm"
    assert "3 parameters in b and 5 in the reference" in result.causes[0].text
    assert result.causes[0].text.endswith("without head.bias, hidden.bias")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clip_that_hardly_acts_is_missed_all_the_same(judge: Judge, ranks: int) -> None:
    """A coefficient next to 1: gradients agree to a percent, but nobody scaled them."""

    class Never(Program):
        def _clip(self, step: int, microbatch: int, call: int) -> None:
            pass

    total = 0.0
    for tensors in Program(steps=1).run():
        total = next(float(v) for fields, v in tensors if fields["slot"] == "total_norm")
    result = judge(Program(max_norm=0.997 * total), Never(max_norm=0.997 * total, ranks=ranks))
    assert place(result) == (0, None, Kind.CLIPPED_GRAD.value, CLIP, "total_norm")
    assert codes(result)[0] == "clip.skipped"
    assert result.causes[0].number == pytest.approx(0.997, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_other_gradient_does_not_hide_that_the_rest_is_clipped_as_much(judge: Judge, ranks: int) -> None:
    """Such as that of a key bias, which is nothing but round-off in correct runs."""
    result = judge(SoInReference(steps=1), OneOther(steps=1, ranks=ranks))
    assert "(clip)" not in {name for _, name in origins(result)}
    assert {o.where.name for o in result.origins} <= {"hidden.bias"}


def test_a_gradient_that_is_not_reduced_is_named_though_ranks_scale_all_others_apart(judge: Judge) -> None:
    result = judge(ByHand(), Unreduced(ranks=2))
    assert first(result).where.name == "hidden.weight"
    assert codes(result)[:1] == ["reduction.missing"]
    assert {name for _, name in origins(result)} == {"hidden.weight"}


def test_a_wrong_coefficient_is_told_of_all_that_it_scales(judge: Judge) -> None:
    result = judge(ByHand(), TwiceTheNorm(ranks=2))
    assert place(result)[2:] == (Kind.CLIPPED_GRAD.value, first(result).where.name, "grad")
    assert {name for _, name in origins(result)} == set(NAMES)
    assert result.causes[0].number == pytest.approx(0.5**0.5, rel=1e-5)
