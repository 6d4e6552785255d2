"""Rows with a second sequence: sources and targets padded each to their own longest row of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import ROOT, Kind
from tests.integration.judged import Judge, assert_equivalent, codes, judge_in, place
from tests.simulated import IGNORE, PAD, VOCABULARY, WIDTH, At, Documents, Program

ENCODER = np.random.default_rng(3).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


def source_of(document: np.ndarray) -> np.ndarray:
    """Return what a document is a translation of: of a length of its own, without padding tokens."""
    length = 5 + int(document.sum()) % 6
    return 1 + (int(document[0]) + 3 * np.arange(length)) % (VOCABULARY - 1)


def padded(sequences: Documents, fill: int, more: int) -> np.ndarray:
    """Return sequences as a matrix as long as the longest, and ``more``."""
    width = max(len(s) for s in sequences) + more
    return np.stack([np.pad(s, (0, width - len(s)), constant_values=fill) for s in sequences])


class Translation(Program):
    """An encoder's mean is added to the decoder's embeddings; its rows are padded by rank and microbatch."""

    masked = False
    more = 0

    def second(self, documents: Documents, ids: np.ndarray) -> np.ndarray:
        """Return the second matrix that the root is given, from a part's documents."""
        return ids

    def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
        own = super().share(documents, rank, microbatch)
        self.shared = {**getattr(self, "shared", {}), (rank, microbatch): own}
        return own

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.name, at.slot, at.kind) == (ROOT, "in.0", Kind.INPUT):
            return self._given(at, np.asarray(value), fields)
        if (at.name, at.slot, at.kind) == (ROOT, "in.0", Kind.ACTIVATION):
            own = at._replace(slot="in.1")
            super()._put(own, self.matrix, **{**fields, "producers": (self.event,)})
            return value
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "embed", "out"):
            value = value + self.mean[:, None]
        return super()._put(at, value, **fields)

    def _given(self, at: At, ids: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
        documents = self.shared[(at.rank, at.microbatch or 0)]
        sources = padded([source_of(d) for d in documents], PAD, self.more)
        super()._put(at, sources, **fields)
        self.event = len(self.records[at.rank])
        self.matrix = super()._put(at._replace(slot="in.1"), self.second(documents, ids), **fields)
        if self.masked:
            super()._put(
                at._replace(slot="in.kw.attention_mask"), (sources != PAD).astype(np.int64), **fields
            )
        encoded = ENCODER[sources]
        super()._put(at._replace(kind=Kind.ACTIVATION, name="encoder", slot="out"), encoded, **fields)
        kept = (sources != PAD)[..., None]
        self.mean = (encoded * kept).sum(axis=1) / kept.sum(axis=1).astype(np.float32)
        maps = np.einsum("bte,bse->bts", ENCODER[np.maximum(ids, 0)], encoded)
        super()._put(at._replace(kind=Kind.ACTIVATION, name="across", slot="out"), maps, **fields)
        return ids


class Inputs(Translation):
    """The decoder's inputs are given, and each row's has as many as labels."""


class InputsOfTargets(Translation):
    """The decoder's inputs are padded targets but the last: a row's last token may have no label."""

    def second(self, documents: Documents, ids: np.ndarray) -> np.ndarray:
        return padded(list(documents), PAD, 0)[:, :-1]


class Labels(Translation):
    """Labels are given, padded by what the loss ignores; the model makes the inputs of them."""

    def second(self, documents: Documents, ids: np.ndarray) -> np.ndarray:
        return padded([d[1:] for d in documents], IGNORE, 0)


class WholeTargets(Translation):
    """Targets are given whole, which the model shifts: the loss has one label fewer."""

    def second(self, documents: Documents, ids: np.ndarray) -> np.ndarray:
        return padded(list(documents), IGNORE, 0)


FORMS = (Inputs, InputsOfTargets, Labels, WholeTargets)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("mask", "split"),
    [(False, {"ranks": 2}), (True, {"ranks": 2, "accumulate": 2}), (True, {"accumulate": 4})],
)
def test_sources_and_targets_padded_otherwise_are_the_same_rows(
    judge: Judge, form: type[Translation], mask: bool, split: dict[str, int]
) -> None:
    class Own(form):  # type: ignore[valid-type,misc]
        masked = mask

    assert_equivalent(judge(Own(), Own(**split)))


def test_sources_may_be_padded_further(judge: Judge) -> None:
    class Wider(Inputs):
        more = 2

    assert_equivalent(judge(Wider(ranks=2), Inputs()))


def test_rows_padded_alike_are_compared_to_the_end(judge: Judge) -> None:
    assert_equivalent(judge(Labels(ranks=2), Labels(accumulate=2)))


class Weighed(Inputs):
    """Token losses are multiplied by a mask: every token's weight is recorded."""

    def mask(self, at: At, targets: np.ndarray) -> np.ndarray:
        return (targets != IGNORE).astype(np.float64)


def test_weights_are_compared_token_by_token(judge: Judge) -> None:
    class Heavier(Weighed):
        def mask(self, at: At, targets: np.ndarray) -> np.ndarray:
            found = super().mask(at, targets)
            found[1] *= 1.5 if (at.step, at.rank) == (1, 1) else 1.0
            return found

    assert_equivalent(judge(Weighed(), Weighed(ranks=2)))
    result = judge(Weighed(), Heavier(ranks=2))
    assert place(result) == (1, 0, "loss", "cross_entropy", "weight")


@pytest.mark.parametrize("form", [InputsOfTargets, WholeTargets])
@pytest.mark.parametrize("name", ["act", "encoder", "across"])
def test_an_activation_of_one_row_is_told_where_it_is_wrong(
    judge: Judge, form: type[Translation], name: str
) -> None:
    slot = "in.0" if name == "act" else "out"

    class Wrong(form):  # type: ignore[valid-type,misc]
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step, at.rank) == (Kind.ACTIVATION, name, slot, 1, 1):
                value = np.array(value)
                value[2, 1] += 0.5
            return value

    result = judge(form(), Wrong(ranks=2))
    assert place(result) == (1, 0, "activation", name, slot)
    assert result.first_divergent is not None
    assert "1 of 8 samples of b (row 2 of rank 1" in str(result.first_divergent)


@pytest.mark.parametrize("form", [Inputs, InputsOfTargets])
def test_a_label_of_one_row_is_told_at_the_loss(judge: Judge, form: type[Translation]) -> None:
    class Wrong(form):  # type: ignore[valid-type,misc]
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.slot, at.step, at.rank) == (Kind.LOSS, "target", 1, 1):
                value = np.array(value)
                value[1] = 1 + value[1] % (VOCABULARY - 1)
            return value

    assert place(judge(form(), Wrong(ranks=2))) == (1, 0, "loss", "cross_entropy", "target")


@pytest.mark.parametrize("form", [Labels, WholeTargets])
def test_a_given_label_of_one_row_is_told_at_the_input(judge: Judge, form: type[Translation]) -> None:
    class Wrong(form):  # type: ignore[valid-type,misc]
        def second(self, documents: Documents, ids: np.ndarray) -> np.ndarray:
            value = super().second(documents, ids)
            if len(documents) == 4 and documents[0] is self.shared[(1, 0)][0]:
                value[0, 1] = 1 + value[0, 1] % (VOCABULARY - 1)
            return np.asarray(value)

    result = judge(form(), Wrong(ranks=2))
    assert place(result) == (0, 0, "input", ROOT, "in.1")
    assert codes(result)[:1] == ["input.different"]


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_padding_that_count_are_told_at_the_loss(judge: Judge, form: type[Translation]) -> None:
    class Counting(form):  # type: ignore[valid-type,misc]
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            return np.maximum(value, PAD) if (at.kind, at.slot) == (Kind.LOSS, "target") else value

    result = judge(form(), Counting(ranks=2))
    assert place(result) == (0, 0, "loss", "cross_entropy", "count")
    assert codes(result)[:1] == ["mask.padding_leak"]
