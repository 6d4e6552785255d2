"""Copies of the model are recorded where they change; gradients of a tensor come from its user."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causality import Graph, Node
from tensortrace.tracer.types import INIT_STEP, Kind, Meta
from tests.integration.judged import Judge, assert_equivalent, codes, place, tampering
from tests.simulated import NAMES, At, Program


class Averaging(Program):
    """A program that keeps a moving average of its parameters, which a rank may cease to move."""

    first_still = 10

    def moves(self, step: int, rank: int) -> bool:
        return rank == 0 or step < self.first_still

    def _record_state(self, step: int, rank: int) -> None:
        super()._record_state(step, rank)
        if step == INIT_STEP:
            self.averages = {**getattr(self, "averages", {}), rank: dict(self.params[rank])}
        elif self.moves(step, rank):
            for name in NAMES:
                held = self.averages[rank]
                held[name] = np.float32(0.9) * held[name] + np.float32(0.1) * self.params[rank][name]
                at = At(step, rank, None, Kind.BUFFER, f"Average.{name}", "model")
                self._record(at, held[name], meta=Meta(text="copy"))


class Ceasing(Averaging):
    first_still = 2


class OnMainRank(Averaging):
    first_still = 0


def test_an_average_that_one_rank_no_longer_moves(judge: Judge) -> None:
    assert_equivalent(judge(Averaging(steps=4), Averaging(steps=4, ranks=2)))
    result = judge(Averaging(steps=4, ranks=2), Ceasing(steps=4, ranks=2))
    assert result.first_divergent is not None
    found = result.first_divergent.where
    assert (found.step, found.kind, found.slot) == (2, "buffer", "model")
    assert found.name.startswith("Average.")
    assert codes(result) == ["replica.disagrees"]
    assert result.causes[0].text.endswith("rank 1 of b kept the value of before the step")


def test_an_average_that_only_the_main_rank_has(judge: Judge) -> None:
    assert_equivalent(judge(Averaging(steps=3), OnMainRank(steps=3, ranks=2)))


@pytest.mark.parametrize("user", ["hidden", "act"])
def test_a_gradient_is_told_at_the_user_of_its_tensor(judge: Judge, user: str) -> None:
    """What left ``embed`` is what ``hidden`` was given: its gradient goes back through ``hidden`` first."""
    wrong = tampering(Kind.ACTIVATION_GRAD, user, "in.0", lambda value: -value)
    result = judge(Program(), wrong())
    assert place(result)[2:] == ("activation_grad", user, "in.0")
    assert codes(result) == ["value.sign"]


def test_a_pass_after_the_update_comes_last() -> None:
    graph = Graph()
    late = Node(3, None, Slot("eval", Kind.INPUT, "(root)", "in.0", 0))
    limit = Node(3, None, Slot("window", Kind.CLIPPED_GRAD, "(clip)", "max_norm", 0))
    following = Node(4, 0, Slot("train", Kind.INPUT, "(root)", "in.0", 0))
    for node in (late, limit, following):
        graph.add(node, ())
    graph.add_late(late)
    assert sorted((following, late, limit), key=graph.order_key) == [limit, late, following]
