"""Positions that mask and loss both ignore, though they hold tokens: left out where the loss tells so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.diff.masks import hidden_ends
from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, place
from tests.simulated import IGNORE, PAD, At, Program


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Masked(Program):
    """A mask hides the last token of each row, and its label is ignored; ``keeps_true`` is its polarity."""

    keeps_true = True
    where = -1
    """Where an activation is wrong in each row: counted from the end of what is no padding; -1 is hidden."""
    wrong = False

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.kind, at.name, at.slot) == (Kind.INPUT, "(root)", "in.0"):
            kept = np.asarray(value) != PAD
            self.length = kept.sum(axis=1)
            self.kept = kept.copy()
            self.kept[np.arange(len(kept)), self.length - 1] = False
            result = super()._put(at, value, **fields)
            mask = self.kept if self.keeps_true else ~self.kept
            super()._put(at._replace(slot="in.1"), mask, **fields)
            return result
        if (at.kind, at.slot) == (Kind.LOSS, "target"):
            value = np.where(self.kept.reshape(-1), value, IGNORE)
        if self.wrong and (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "act", "in.0", 1):
            value = np.array(value)
            value[np.arange(len(value)), self.length + self.where] += 1
        return super()._put(at, value, **fields)


class Inverted(Masked):
    keeps_true = False


class WrongWhereHidden(Masked):
    wrong = True


class InvertedWrongWhereHidden(Inverted):
    wrong = True


class WrongWhereValid(Masked):
    wrong = True
    where = -2


@pytest.mark.parametrize(
    ("reference", "program"),
    [
        (Masked, WrongWhereHidden), (Inverted, InvertedWrongWhereHidden), (WrongWhereHidden, Masked),
        (Masked, Masked),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_mask_and_loss_ignore_is_left_out_and_counted(
    judge: Judge, reference: type[Program], program: type[Program], ranks: int
) -> None:
    result = judge(reference(), program(ranks=ranks))
    assert_equivalent(result)
    assert any("hold tokens, but mask and loss both ignore them" in note for note in result.notes)


def test_what_the_loss_wants_is_compared(judge: Judge) -> None:
    assert place(judge(Masked(), WrongWhereValid())) == (1, 0, "activation", "act", "in.0")


TOKENS = np.arange(1, 9).reshape(2, 4)
IGNORED = np.array([[False, False, True, True], [False, True, True, True]])


def test_a_matrix_of_which_the_loss_wants_both_values_tells_nothing() -> None:
    mixed = np.array([[1, 0, 0, 0], [1, 0, 0, 0]])
    assert hidden_ends({"in.0": TOKENS, "in.1": mixed}, TOKENS, IGNORED) is None


def test_only_ends_that_every_mask_hides_are_left_out() -> None:
    attended = np.array([[1, 1, 1, 0], [1, 1, 0, 0]])  # a prompt is ignored, and attended to
    answers = np.array([[1, 1, 0, 0], [1, 0, 0, 0]])
    ends = hidden_ends({"in.0": TOKENS, "in.1": attended, "in.2": answers}, TOKENS, IGNORED)
    assert ends is not None
    np.testing.assert_array_equal(ends, attended == 0)


def test_what_the_loss_ignores_without_a_mask_is_compared() -> None:
    assert hidden_ends({"in.0": TOKENS}, TOKENS, IGNORED) is None
