"""Where no cause fits, the finding says in which rows, positions, columns and parts the difference lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.result import Finding
from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, first, judge_in, tampering
from tests.resharded import COPY, Held, Resharded
from tests.simulated import At, Program

Edit = Callable[[np.ndarray], np.ndarray]


def noisy(*index: object) -> Edit:
    """Return an edit that no cause explains: noise on a part of the tensor."""

    def edit(value: np.ndarray) -> np.ndarray:
        part = value[index]
        value[index] = part + np.random.default_rng(5).normal(size=part.shape)
        return value

    return edit


def found(judge: Judge, kind: Kind, name: str, slot: str, edit: Edit, ranks: int = 1, **only: int) -> Finding:
    mistaken = tampering(kind, name, slot, edit, step=0, **only)
    return first(judge(Program(ranks=ranks), mistaken(ranks=ranks)))


def words(finding: Finding) -> str:
    assert finding.location is not None
    return finding.location.text


def test_a_block_of_columns_is_named_as_one_of_equal_blocks(judge: Judge) -> None:
    finding = found(judge, Kind.ACTIVATION, "hidden", "out", noisy(..., slice(3, 6)))
    assert words(finding) == (
        "the difference lies in columns 3-5 of 12, which is block 1 of 4 equal ones (a head if there are 4)"
    )
    assert finding.location is not None
    assert finding.location.share == pytest.approx(1)
    assert finding.location.part == pytest.approx(3 / 12)
    assert [(a.what, a.indices, a.count) for a in finding.location.along] == [("columns", (3, 4, 5), 12)]


def test_every_fourth_column(judge: Judge) -> None:
    finding = found(judge, Kind.ACTIVATION, "hidden", "out", noisy(..., slice(1, None, 4)))
    assert words(finding) == "the difference lies in columns 1 and every 4 further (3 times) of 12"


def test_one_sample_and_its_rank(judge: Judge) -> None:
    finding = found(judge, Kind.ACTIVATION, "hidden", "out", noisy(2), ranks=2, rank=1)
    assert "in 1 of 8 samples of b (row 2 of rank 1, microbatch 0)" in words(finding)


def test_all_rows_of_one_rank(judge: Judge) -> None:
    finding = found(judge, Kind.ACTIVATION, "hidden", "out", noisy(...), ranks=4, rank=2)
    assert words(finding) == "the difference lies in the rows of rank 2 of b"
    assert finding.ranks == (2,)


def test_the_last_valid_position_of_each_row(judge: Judge) -> None:
    class Last(Program):
        def tamper(self, at, value):  # type: ignore[no-untyped-def]
            if (at.kind, at.name, at.slot, at.step) != (Kind.ACTIVATION, "hidden", "out", 0):
                return value
            value = np.array(value)
            for row, document in enumerate(self.documents(0)):
                value[row, len(document) - 2] += np.random.default_rng(row).normal(size=value.shape[-1])
            return value

    assert (
        words(first(judge(Program(), Last()))) == "the difference lies in the last valid position of each row"
    )


def test_vocabulary_rows_of_a_table(judge: Judge) -> None:
    finding = found(judge, Kind.LOCAL_GRAD, "embed.weight", "grad", noisy([3, 7]))
    assert words(finding) == "the difference lies in vocabulary rows 3, 7 of 23"


def test_the_last_rows_and_one_column_of_them(judge: Judge) -> None:
    finding = found(judge, Kind.LOCAL_GRAD, "hidden.weight", "grad", noisy(slice(7, None), slice(2, 3)))
    assert words(finding) == (
        "the difference lies in the last 5 rows (7-11 of 12), within them in column 2 of 8"
    )
    assert finding.location is not None
    assert finding.location.part == pytest.approx(5 / 12 / 8)


def test_what_is_wrong_everywhere_has_no_place(judge: Judge) -> None:
    assert found(judge, Kind.ACTIVATION, "hidden", "out", noisy(...)).location is None


def test_the_shard_of_one_rank(tmp_path: Path) -> None:
    def split(at: At) -> Held:
        return Held("shard", 0) if (at.kind, at.name) == (Kind.PARAM, "hidden.weight") else COPY

    def wrong(at: At, inner: int, value: np.ndarray) -> np.ndarray:
        if split(at).how != "shard" or inner != 1:
            return value
        return value + np.random.default_rng(3).normal(size=value.shape).astype(value.dtype)

    judge = judge_in(tmp_path)
    b = Resharded(Program(steps=1), 3, split, edit=wrong).write(tmp_path / "b")
    finding = first(judge(judge.write(Program(steps=1)), b))
    assert words(finding) == "the difference lies in the shard of rank 1 (indices 4-7 of dimension 0)"
