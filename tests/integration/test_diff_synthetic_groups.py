"""Tensors of one entry for each pair, or group, of rows: margins of answers, advantages of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import ROOT, Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, place
from tests.simulated import Documents, Program
from tests.synthetic import Tensor

GROUP = 2


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Blocks(Program):
    """The first rows of a batch are one half of its pairs, the others the other half; a module subtracts."""

    def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
        half = len(documents) // GROUP
        pairs = self.dealt(list(range(half)))[rank :: self.setup.ranks][microbatch :: self.setup.accumulate]
        return [documents[n + half * member] for member in range(GROUP) for n in pairs]

    def dealt(self, pairs: list[int]) -> list[int]:
        """Return the pairs in the order in which this program reads them."""
        return pairs

    def groups_of(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(GROUP, -1).T

    def run(self) -> list[list[Tensor]]:
        self.records = [
            [found for record in of_rank for found in self.with_margin(rank, record)]
            for rank, of_rank in enumerate(super().run())
        ]
        return self.records

    def with_margin(self, rank: int, record: Tensor) -> list[Tensor]:
        fields, _ = record
        if (fields["kind"], fields["name"], fields["slot"]) != (Kind.LOSS, "backward", "value"):
            return [record]
        [out] = [
            v
            for f, v in self.records[rank]
            if (f["kind"], f["name"], f["slot"]) == (Kind.ACTIVATION, ROOT, "out")
            and (f["step"], f["microbatch"]) == (fields["step"], fields["microbatch"])
        ]
        of_rows = self.groups_of(out[:, 0].sum(axis=-1))
        margin = (of_rows[:, 0] - of_rows[:, 1:].sum(axis=1)).astype(np.float32)
        own: dict[str, Any] = {"kind": Kind.ACTIVATION, "name": "margin", "slot": "out", "producers": ()}
        return [(fields | own, self.planted(fields, margin)), record]

    def planted(self, fields: dict[str, Any], margin: np.ndarray) -> np.ndarray:
        return margin


class Reversed(Blocks):
    def dealt(self, pairs: list[int]) -> list[int]:
        return pairs[::-1]


class Neighbours(Blocks):
    """The rows of a pair follow each other."""

    def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
        found = super().share(documents, rank, microbatch)
        half = len(found) // GROUP
        return [found[n + half * member] for n in range(half) for member in range(GROUP)]

    def groups_of(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, GROUP)


@pytest.mark.parametrize("program", [Blocks, Neighbours, Reversed])
@pytest.mark.parametrize("split", [{}, {"ranks": 2}, {"accumulate": 2}, {"ranks": 2, "accumulate": 2}])
def test_what_pairs_of_rows_make_meets(judge: Judge, program: type[Program], split: dict[str, int]) -> None:
    reference = Neighbours if program is Neighbours else Blocks
    result = judge(reference(order=1, rows=12), program(**split, rows=12))
    assert_equivalent(result)
    assert any(b.where.name == "margin" for b in result.boundaries)


class Swapped(Reversed):
    def planted(self, fields: dict[str, Any], margin: np.ndarray) -> np.ndarray:
        return margin[[1, 0, *range(2, len(margin))]] if fields["step"] == 1 else margin


class Negated(Blocks):
    def planted(self, fields: dict[str, Any], margin: np.ndarray) -> np.ndarray:
        return -margin if fields["step"] == 1 else margin


@pytest.mark.parametrize("program", [Swapped, Negated])
@pytest.mark.parametrize("split", [{}, {"ranks": 2}])
def test_a_mistake_in_what_pairs_make_is_found(
    judge: Judge, program: type[Program], split: dict[str, int]
) -> None:
    result = judge(Blocks(order=1, rows=12), program(**split, rows=12))
    assert place(result) == (1, 0 if not split else None, "activation", "margin", "out") or (
        place(result)[0] == 1 and place(result)[3] == "margin"
    )
