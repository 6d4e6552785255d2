"""A loss that every rank computes of all ranks' gathered rows, against one of each rank's own rows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, place
from tests.simulated import Program
from tests.synthetic import Tensor


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Whole(Program):
    """Records on every rank the loss of all ranks' rows."""

    def run(self) -> list[list[Tensor]]:
        records = super().run()
        found: dict[Any, list[np.ndarray]] = defaultdict(list)
        for fields, value in (record for of_rank in records for record in of_rank):
            if self.whole(fields):
                found[self.key(fields)].append(np.asarray(value))
        self.records = [
            [self.gathered(rank, fields, value, found) for fields, value in of_rank]
            for rank, of_rank in enumerate(records)
        ]
        return self.records

    def whole(self, fields: dict[str, Any]) -> bool:
        return fields["kind"] == Kind.LOSS and fields["slot"] in ("sum", "count", "target", "value")

    def key(self, fields: dict[str, Any]) -> Any:
        return fields["step"], fields["microbatch"], fields["name"], fields["slot"]

    def gathered(self, rank: int, fields: dict[str, Any], value: np.ndarray, found: Any) -> Tensor:
        if not self.whole(fields) or fields["name"] == "backward":
            return fields, value
        all_ranks = found[self.key(fields)]
        value = np.concatenate(all_ranks) if fields["slot"] == "target" else np.asarray(sum(all_ranks))
        return fields, self.planted(rank, fields, value)

    def planted(self, rank: int, fields: dict[str, Any], value: np.ndarray) -> np.ndarray:
        return value


@pytest.mark.parametrize("reference", [{}, {"ranks": 2}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_whole_loss_on_every_rank_is_one_of_all_rows(
    judge: Judge, reference: dict[str, int], accumulate: int
) -> None:
    assert_equivalent(judge(Program(order=1, **reference), Whole(ranks=2, accumulate=accumulate)))
    assert_equivalent(judge(Whole(ranks=2, accumulate=accumulate), Program(order=1, **reference)))


class SumOff(Whole):
    def planted(self, rank: int, fields: dict[str, Any], value: np.ndarray) -> np.ndarray:
        return value * 1.001 if (rank, fields["slot"], fields["step"]) == (1, "sum", 1) else value


class LabelOff(Whole):
    def planted(self, rank: int, fields: dict[str, Any], value: np.ndarray) -> np.ndarray:
        if (rank, fields["slot"], fields["step"]) == (1, "target", 1):
            value = value.copy()
            value[0] += 1
        return value


@pytest.mark.parametrize(("program", "slot"), [(SumOff, "sum"), (LabelOff, "target")])
def test_a_whole_loss_that_is_wrong_on_one_rank_is_found(
    judge: Judge, program: type[Whole], slot: str
) -> None:
    result = judge(Program(ranks=2), program(ranks=2))
    assert place(result) == (1, 0, "loss", "cross_entropy", slot)


class TwiceAsMuch(Whole):
    """The loss is a sum over ranks although gradients are averaged: everything weighs twice as much."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 2 * super().token_weight(counts, rank, microbatch)


class OneRankMore(Whole):
    """Rank 1 weighs its loss by 1.01."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return (1.01 if rank else 1.0) * super().token_weight(counts, rank, microbatch)


@pytest.mark.parametrize("program", [TwiceAsMuch, OneRankMore])
def test_a_whole_loss_of_other_weight_is_found_in_the_gradients(judge: Judge, program: type[Whole]) -> None:
    result = judge(Program(ranks=2), program(ranks=2))
    assert place(result)[0] == 0
    assert str(place(result)[2]).endswith("_grad")
