"""What differs without effect is no difference; a way back that is cut off is told where it is cut."""

from __future__ import annotations

import numpy as np

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, codes, place
from tests.simulated import At, Program


class Assigning(Program):
    """A program that assigns gradients in the place of adding to what is there."""

    drops = True

    def zeroes(self, step: int) -> bool:
        return self.drops

    def _record_leftovers(self, step: int, rank: int) -> None:
        super()._record_leftovers(step, rank)
        self.grads[rank] = {}


class Leaving(Assigning):
    drops = False


def test_gradients_that_are_left_over_and_overwritten(judge: Judge) -> None:
    result = judge(Assigning(steps=3), Leaving(steps=3))
    assert_equivalent(result)
    assert any("overwritten" in note for note in result.notes)
    assert codes(judge(Program(steps=3), Adding(steps=3))) == ["grad.not_zeroed"]


class Adding(Program):
    def zeroes(self, step: int) -> bool:
        return False


class Detached(Program):
    """``hidden`` gets no gradient; ``embed`` still gets one, by another way."""

    def keeps(self, at: At) -> bool:
        cut = at.name in ("hidden", "act") and at.kind == Kind.ACTIVATION_GRAD
        return not cut and not (at.name.startswith("hidden.") and at.kind in _RUNGS)

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name) == (Kind.ACTIVATION_GRAD, "embed"):
            return np.asarray(value * np.linspace(0.2, 0.9, value.shape[-1]), value.dtype)
        return value


_RUNGS = (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.CLIPPED_GRAD)


def test_a_module_to_which_no_gradient_comes_back(judge: Judge) -> None:
    result = judge(Program(steps=1), Detached(steps=1))
    assert place(result)[2:] == ("activation_grad", "act", "out")
    assert codes(result) == ["boundary.missing"]
    assert "a gradient comes to act only in a" in result.headline
