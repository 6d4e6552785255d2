"""A run that climbs the ladder in another order is told so; buckets that overtake each other are not."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, codes, origins, place
from tests.simulated import BIASES, Arrays, At, Program


class ClipsFirst(Program):
    """Each rank clips its own gradients; what is left of them is averaged then."""

    def _reduce(self, step: int) -> None:
        pass

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        super()._clip(step, microbatch, call)
        super()._reduce(step)


class UpdatesFirst(Program):
    """Each rank updates with its own gradients, which are averaged then: nobody waited for the reduction."""

    def _reduce(self, step: int) -> None:
        self.own = [dict(grads) for grads in self.grads]

    def _update(self, step: int, rank: int, sums: Arrays) -> None:
        super()._update(step, rank, sums)
        if rank == self.setup.ranks - 1:
            used, self.grads = self.grads, self.own
            super()._reduce(step)
            self.grads = used


class ClipsLast(Program):
    """Clips what the optimizer has consumed already."""

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        self.late = (microbatch, call)

    def _update(self, step: int, rank: int, sums: Arrays) -> None:
        super()._update(step, rank, sums)
        if rank == self.setup.ranks - 1:
            super()._clip(step, *self.late)


def test_clipping_after_the_update(judge: Judge) -> None:
    result = judge(Program(), ClipsLast())
    assert place(result)[:3] == (0, None, "clipped_grad")
    assert codes(result)[0] == "clip.skipped"
    assert result.causes[0].text == (
        "b clips after its optimizer's step, which consumes the gradient as it was"
    )
    assert result.causes[0].residual_after < 1e-6
    mirrored = judge(ClipsLast(), Program())
    assert codes(mirrored)[0] == "clip.skipped"
    assert mirrored.causes[0].text.startswith("a clips after its optimizer's step")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("reference", [1, 2])
def test_clipping_before_the_reduction(judge: Judge, ranks: int, reference: int) -> None:
    result = judge(Program(ranks=reference), ClipsFirst(ranks=ranks))
    assert place(result)[:3] == (0, None, "reduced_grad")
    assert codes(result)[0] == "ladder.order"
    assert result.causes[0].text == (
        "b clips before it reduces, each rank by the norm of its own gradient; a reduces first"
    )
    assert result.causes[0].residual_before > 1e-2
    assert result.causes[0].residual_after < 1e-6


def test_an_update_before_the_reduction(judge: Judge) -> None:
    result = judge(Program(ranks=2), UpdatesFirst(ranks=2))
    assert codes(result)[0] == "ladder.order"
    assert result.causes[0].text.startswith("b updates before it reduces, each rank with its own gradient")


def test_gradients_that_are_reduced_in_another_order_of_parameters_are_no_difference(judge: Judge) -> None:
    class Overtaking(Program):
        """Buckets are reduced last parameter first."""

        def _reduce(self, step: int) -> None:
            before = [len(records) for records in self.records]
            super()._reduce(step)
            for records, start in zip(self.records, before, strict=True):
                records[start:] = records[start:][::-1]

    assert_equivalent(judge(Program(ranks=2), Overtaking(ranks=2)))


def test_another_order_whose_values_are_other_values_is_not_explained_by_it(judge: Judge) -> None:
    class Noisy(ClipsFirst):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.slot, at.step) == (Kind.REDUCED_GRAD, "grad", 0):
                return np.asarray(value + np.random.default_rng(3).normal(size=value.shape), value.dtype)
            return value

    assert "ladder.order" not in codes(judge(Program(ranks=2), Noisy(ranks=2)))


class ClipsByHand(Program):
    """Clips without a function that clips; a subclass says which parameters take part, and in which norm."""

    spared: tuple[str, ...] = ()

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        for grads in self.grads:
            norm = float(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values())))
            coefficient = np.float32(min(1.0, self.setup.max_norm / (norm + 1e-6)))
            for name in grads:
                grads[name] = grads[name] if name in self.spared else grads[name] * coefficient


class ClipsNoBiases(ClipsByHand):
    spared = BIASES


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clip_by_hand_that_leaves_parameters_out_is_told_of_these(judge: Judge, ranks: int) -> None:
    assert judge(Program(), ClipsByHand(ranks=ranks)).verdict == "equivalent"
    result = judge(Program(), ClipsNoBiases(ranks=ranks))
    assert place(result) == (0, None, "clipped_grad", "head.bias", "grad")
    assert {name for kind, name in origins(result) if kind == "clipped_grad"} == set(BIASES)
    assert codes(result)[0] == "clip.skipped"
    assert result.causes[0].residual_after < 1e-6
    mirrored = judge(ClipsNoBiases(ranks=ranks), Program())
    assert place(mirrored) == (0, None, "clipped_grad", "head.bias", "grad")
    assert codes(mirrored)[0] == "clip.skipped"
