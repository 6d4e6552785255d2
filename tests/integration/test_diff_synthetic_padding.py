"""Padding of rows and of the vocabulary that influences what it should not is named."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, codes, place, tampering
from tests.simulated import IGNORE, PAD, ROOT, VOCABULARY, At, Documents, Program

NAMED = 18
"""Tokens of these programs are less than this: what is above is padding of the vocabulary."""


class Padded(Program):
    """A program whose vocabulary is padded: its tokens are less than ``NAMED``."""

    def documents(self, step: int) -> Documents:
        rng = np.random.default_rng(1000 + step)
        return [rng.integers(1, NAMED, size=n) for n in rng.integers(3, 10, size=self.setup.rows)]


class Cut(Padded):
    """Its loss leaves the scores of padded entries out; the gradient is that of all, which comes later."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, ROOT, "out"):
            self.scores = value.reshape(-1, VOCABULARY).astype(np.float64)
        if (at.kind, at.slot) == (Kind.LOSS, "target"):
            self.targets = value
        if (at.kind, at.name, at.slot) == (Kind.LOSS, "cross_entropy", "sum"):
            valid = self.targets != IGNORE
            kept = self.scores[valid, :NAMED]
            return np.asarray(
                np.sum(np.log(np.exp(kept).sum(axis=1)) - kept[range(len(kept)), self.targets[valid]])
            )
        return value


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_softmax_over_padded_entries(judge: Judge, ranks: int) -> None:
    result = judge(Cut(steps=1), Padded(steps=1, ranks=ranks))
    assert place(result)[2:] == ("loss", "cross_entropy", "sum")
    assert codes(result) == ["vocab.padding"]
    assert result.causes[0].number == VOCABULARY - NAMED


def test_scores_that_one_run_masks_away(judge: Judge) -> None:
    def masked(value: np.ndarray) -> np.ndarray:
        value[..., NAMED:] = -1e9
        return value

    mask = tampering(Kind.ACTIVATION, "head", "out", masked)

    class Masked(mask, Padded):  # type: ignore[misc, valid-type]
        pass

    assert_equivalent(judge(Masked(), Masked(ranks=2)))
    result = judge(Masked(), Padded())
    assert place(result)[2:] == ("activation", "head", "out")
    assert codes(result)[0] == "vocab.padding"


def test_rows_that_no_token_names_are_trained(judge: Judge) -> None:
    class Trained(Padded):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.LOCAL_GRAD, "embed.weight", "grad", 0):
                value = np.array(value)
                value[NAMED:] += np.random.default_rng(3).normal(size=value[NAMED:].shape)
            return value

    result = judge(Padded(), Trained())
    assert place(result)[2:] == ("local_grad", "embed.weight", "grad")
    assert codes(result) == ["vocab.padding"]
    assert result.causes[0].number == VOCABULARY - NAMED


def test_rows_of_tokens_that_occur_are_no_padding(judge: Judge) -> None:
    class Wrong(Padded):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.LOCAL_GRAD, "embed.weight", "grad", 0):
                value = np.array(value)
                value[NAMED - 3 :] += np.random.default_rng(3).normal(size=value[NAMED - 3 :].shape)
            return value

    assert "vocab.padding" not in codes(judge(Padded(), Wrong()))


class Pooling(Program):
    """A program that takes the mean of the hidden layer over the valid positions of each row."""

    everywhere = False

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.slot) == (Kind.INPUT, "in.0"):
            self.ids = value
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "in.0"):
            valid = np.ones_like(self.ids) if self.everywhere else (self.ids != PAD)
            mean = (value * valid[..., None]).sum(axis=1) / valid.sum(axis=1, keepdims=True)
            event = len(self.records[at.rank]) - 1  # the hidden layer's output
            pool = at._replace(name="pool", slot="out")
            self._put(pool, mean.astype(np.float32), shard="data", producers=(event,))
        return value


class Everywhere(Pooling):
    everywhere = True


def test_a_mean_over_padding(judge: Judge) -> None:
    assert_equivalent(judge(Pooling(), Pooling(ranks=2)))
    result = judge(Pooling(), Everywhere(ranks=2))
    assert place(result)[2:] == ("activation", "pool", "out")
    assert codes(result)[0] == "mask.padding_leak"
    assert result.causes[0].text == "pool takes the mean over all positions in b, padding included"


def wrong_rows(padded: bool) -> type[Program]:
    """Return a program whose hidden layer is wrong in rows that have padding, or in others as many."""

    class Wrong(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.slot) == (Kind.INPUT, "in.0"):
                self.ids = value
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "hidden", "out", 0):
                rows = np.any(self.ids == PAD, axis=1)
                rows = rows if padded else np.roll(rows, 1)
                noise = np.random.default_rng(3).normal(size=value.shape)
                return np.asarray(value + rows[:, None, None] * noise, value.dtype)
            return value

    return Wrong


def test_rows_that_have_padding_are_wrong_and_the_others_right(judge: Judge) -> None:
    result = judge(Program(), wrong_rows(padded=True)())
    assert place(result)[2:] == ("activation", "hidden", "out")
    assert codes(result) == ["mask.padding_leak"]
    assert "mask.padding_leak" not in codes(judge(Program(), wrong_rows(padded=False)()))


class Halved(Program):
    """A program that halves the time, channels before positions, and puts frames of padding to zero."""

    masked, rolled = True, 0

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.slot) == (Kind.INPUT, "in.0"):
            self.ids = value
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "in.0"):
            valid = np.roll(self.ids != PAD, self.rolled, axis=0)[:, ::2]
            frames = value[:, ::2] * (valid[..., None] if self.masked else 1)
            event = len(self.records[at.rank]) - 1  # the hidden layer's output
            halve = at._replace(name="halve", slot="out")
            frames = np.ascontiguousarray(frames.transpose(0, 2, 1), np.float32)
            self._put(halve, frames, shard="data", producers=(event,))
        return value


class Unmasked(Halved):
    masked = False


class OfOthers(Halved):
    rolled = 1


def test_frames_of_padding_that_are_not_put_to_zero(judge: Judge) -> None:
    """What halves the time leaves a tensor to which the batch's mask does not fit."""
    result = judge(Halved(steps=1), Unmasked(steps=1))
    assert place(result)[2:] == ("activation", "halve", "out")
    assert codes(result)[0] == "mask.padding_leak"
    assert "along dimension 2, where the reference has zeros" in result.causes[0].text
    assert "mask.padding_leak" not in codes(judge(OfOthers(steps=1), Unmasked(steps=1)))
