"""Tokens that go to experts: in any order and split, told apart by gradients where they begin alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, codes, judge_in, place
from tests.simulated import At, Documents, Program


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Mixture(Program):
    """Gives each position's embedding, of which many are equal, to one of three experts.

    ``wrong`` is an error of one row of the gradient at an expert's output.
    """

    wrong = 0.0
    called = "moe.experts"

    def documents(self, step: int) -> Documents:
        return list(np.random.default_rng(step).integers(1, 20, size=(10, 6)))

    def goes_to(self, experts: np.ndarray, expert: int) -> np.ndarray:
        """Return which tokens, of which each has its expert, one is given."""
        return experts == expert

    def order(self, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the tokens of an expert in the order in which it is given them."""
        return chosen

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "in.0"):
            self.forward(at, value.reshape(-1, value.shape[-1]))
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "embed", "out"):
            self.backward(at, value.reshape(-1, value.shape[-1]))
        return value

    def forward(self, at: At, tokens: np.ndarray) -> None:
        embedded = (len(self.records[at.rank]) - 1,)
        experts = np.digitize(tokens[:, 0], [-0.3, 0.3])
        chosen = [self.order(tokens, np.flatnonzero(self.goes_to(experts, e))) for e in range(3)]
        self.sent = [(tokens[rows], rows) for rows in chosen]
        self.routed = experts
        for e, (given, _) in enumerate(self.sent):
            at = at._replace(kind=Kind.ACTIVATION, name=f"{self.called}.{e}", slot="in.0")
            event = len(self.records[at.rank])
            self._put(at, given, shard="data", producers=embedded)
            self._put(at._replace(slot="out"), np.tanh(given), shard="data", producers=(event,))

    def backward(self, at: At, gradient: np.ndarray) -> None:
        for e, (given, rows) in enumerate(self.sent):
            at = at._replace(kind=Kind.ACTIVATION_GRAD, name=f"{self.called}.{e}", slot="out")
            made = gradient[rows] * (self.routed[rows] == e)[:, None].astype(np.float32)
            if len(made):
                made[0] *= np.float32(1 + self.wrong * (e == 1))
            self._put(at, made, shard="data")
            own = made * (1 - np.tanh(given) ** 2)
            self._put(at._replace(slot="in.0"), self.at_input(own, gradient), shard="data")

    def at_input(self, own: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """Return the gradient of what an expert was given: its own alone, which was given nothing else."""
        return own


class Reversed(Mixture):
    """Reads the rows of the batch in the other order."""

    def documents(self, step: int) -> Documents:
        return super().documents(step)[::-1]


@pytest.mark.parametrize("settings", [{}, {"ranks": 2}, {"accumulate": 2}])
def test_equal_tokens_of_an_expert_meet_by_their_gradients(judge: Judge, settings: dict[str, int]) -> None:
    assert_equivalent(judge(Mixture(), Reversed(**settings)))


def test_a_wrong_gradient_of_one_of_equal_tokens_is_found(judge: Judge) -> None:
    class Wrong(Reversed):
        wrong = 1e-3

    found = judge(Mixture(), Wrong(ranks=2))
    assert place(found)[2:] == ("activation_grad", "moe.experts.1", "out")


class ByWeight(Mixture):
    """Gives each expert its tokens sorted by their second number."""

    def order(self, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return chosen[np.argsort(-tokens[chosen, 1], kind="stable")]


@pytest.mark.parametrize("name", ["moe.experts", "branches"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_order_within_an_expert_is_no_difference(judge: Judge, ranks: int, name: str) -> None:
    class Named(Mixture):
        called = name

    class Other(ByWeight):
        called = name

    assert_equivalent(judge(Named(), Other(ranks=ranks)))


def test_what_is_not_of_the_batch_has_an_order(judge: Judge) -> None:
    """A table's rows are no tokens: in another order they are others."""

    class Table(Mixture):
        called = "table"

        def forward(self, at: At, tokens: np.ndarray) -> None:
            rows = np.random.default_rng(5).normal(size=(4, 8)).astype(np.float32)
            rows = self.order(rows, rows)
            self._put(at._replace(name="table"), rows, shard="replicate")
            self._put(at._replace(name="table", slot="out"), 2 * rows, shard="replicate")

        def backward(self, at: At, gradient: np.ndarray) -> None:
            pass

    class Other(Table):
        def order(self, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
            return chosen[::-1]

    found = judge(Table(), Other())
    assert place(found)[2:] == ("activation", "table", "in.0")
    assert codes(found)[0] == "layout.permuted_blocks"


class Dense(Mixture):
    """Every expert computes all tokens, and what is not routed to it counts for nothing."""

    def goes_to(self, experts: np.ndarray, expert: int) -> np.ndarray:
        return np.ones(len(experts), dtype=bool)

    def at_input(self, own: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        return gradient  # whatever all modules that take the tokens give


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_that_count_for_nothing_are_no_difference(judge: Judge, ranks: int) -> None:
    """But the gradient of what experts were given, which is of all that take it where they are given all."""
    for result in (judge(Mixture(), Dense(ranks=ranks)), judge(Dense(), Mixture(ranks=ranks))):
        assert (result.verdict, result.coverage.complete) == ("equivalent", True), result.headline
        (gap,) = result.coverage.missing
        assert {(w.kind, w.slot) for w in gap.examples} == {("activation_grad", "in.0")}


def test_a_wrong_gradient_among_tokens_that_count_for_nothing_is_found(judge: Judge) -> None:
    class Wrong(Dense):
        def backward(self, at: At, gradient: np.ndarray) -> None:
            super().backward(at, gradient * np.float32(1.001))

    assert place(judge(Mixture(), Wrong()))[2:4] == ("activation_grad", "moe.experts.0")


def test_tokens_that_the_program_drops_are_told_as_without_counterpart(judge: Judge) -> None:
    class Dropping(Mixture):
        def order(self, tokens: np.ndarray, chosen: np.ndarray) -> np.ndarray:
            return chosen[:-1]

    result = judge(Mixture(), Dropping())
    assert any("1 have no counterpart" in gap.reason for gap in result.coverage.missing)


def test_an_expert_that_is_given_anothers_tokens_is_told(judge: Judge) -> None:
    """Experts 0, 1 and 2 of b are given the tokens of 1, 2 and 0."""

    class Rolled(Mixture):
        def goes_to(self, experts: np.ndarray, expert: int) -> np.ndarray:
            return experts == (expert + 1) % 3

    found = judge(Mixture(), Rolled())
    assert place(found) == (0, 0, "activation", "moe.experts.0", "in.0")
    assert codes(found)[0] == "layout.permuted_blocks"
    assert "moe.experts.0 is given a's moe.experts.1" in found.headline
    assert found.causes[0].number == 3


class Pooled(Program):
    """Gives a module one token of each row: the first or second, whose first number is greater."""

    def documents(self, step: int) -> Documents:
        draw = np.random.default_rng(step)
        return [draw.integers(1, 20, size=draw.integers(2, 40)) for _ in range(10)]

    def place(self, rows: np.ndarray) -> np.ndarray:
        """Return which position of each row stands for it."""
        return rows[:, :2, 0].argmax(axis=1)

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "in.0"):
            embedded = (len(self.records[at.rank]) - 1,)
            pooled = value[np.arange(len(value)), self.place(value)]
            self._put(at._replace(name="pooled"), pooled, shard="data", producers=embedded)
        return value


def test_one_token_of_each_row_stands_for_its_row(judge: Judge) -> None:
    # More tokens are padding than rows take another token: none of these may pass for padding.
    class First(Pooled):
        def place(self, rows: np.ndarray) -> np.ndarray:
            return 1 - super().place(rows)

    found = judge(Pooled(), First())
    assert place(found) == (0, 0, Kind.ACTIVATION, "pooled", "in.0")
    assert_equivalent(judge(Pooled(), Pooled(ranks=2)))


class Masked(Pooled):
    """Gives a module two tokens of each row; of the first row those at ``of_first``."""

    of_first = (0, 1)

    def documents(self, step: int) -> Documents:
        return [np.array([21, 22, 21]), *super().documents(step)[1:]]

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "in.0"):
            embedded = (len(self.records[at.rank]) - 1,)
            chosen = np.concatenate([value[0, list(self.of_first)], *value[1:, :2]])
            self._put(at._replace(name="masked"), chosen, shard="data", producers=embedded)
        return value


def test_a_chosen_token_without_counterpart_is_no_padding(judge: Judge) -> None:
    # No other row has token 22, which another follows; and many more are padding than are lost.
    class Fewer(Masked):
        of_first = (0,)

    found = judge(Masked(), Fewer())
    assert found.verdict == "incomplete"
    assert any(
        "have no counterpart, and are no padding" in missing.reason for missing in found.coverage.missing
    )
    assert_equivalent(judge(Masked(), Masked(order=1)))
