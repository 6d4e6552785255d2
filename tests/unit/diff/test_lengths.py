"""Features padded to another length, with the lengths beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.lengths import MASK, with_mask_of_lengths
from tensortrace.tracer.types import ROOT, Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, origins, place
from tests.synthetic import Tensor, write_trace

LENGTHS = (4, 2, 3, 1)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


def features(padded: int, rows: tuple[int, ...] = (0, 1, 2, 3)) -> np.ndarray:
    """Return [rows, positions, 2]: row r holds 10 r + position + 1, zero beyond its length."""
    found = np.zeros((len(rows), padded, 2), dtype=np.float32)
    for at, row in enumerate(rows):
        found[at, : LENGTHS[row]] = (10 * row + np.arange(LENGTHS[row]) + 1)[:, None]
    return found


def test_zeros_beyond_lengths_are_padding() -> None:
    given = {"in.0": features(5), "in.1": np.array(LENGTHS)}
    mask = with_mask_of_lengths(given, time_major=False)[MASK]
    assert mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    channels_first = {"in.0": np.swapaxes(features(5), 1, 2), "in.1": np.array(LENGTHS)}
    assert with_mask_of_lengths(channels_first, time_major=False)[MASK].tolist() == mask.tolist()
    time_major = {"in.0": np.swapaxes(features(5), 0, 1), "in.1": np.array(LENGTHS)}
    assert with_mask_of_lengths(time_major, time_major=True)[MASK].T.tolist() == mask.tolist()


@pytest.mark.parametrize("labels", [(4, 1, 3, 1), (0, 2, 3, 1), (6, 2, 3, 1)])
def test_other_numbers_are_no_lengths(labels: tuple[int, ...]) -> None:
    given = {"in.0": features(5), "in.1": np.array(labels)}
    assert MASK not in with_mask_of_lengths(given, time_major=False)


def recorded(
    judge: Judge, parts: list[tuple[int, tuple[int, ...]]], *, off: bool = False, time_major: bool = False
) -> Path:
    """Return a trace whose microbatches hold some rows padded to some length; the module doubles them."""
    tensors: list[Tensor] = []
    for number, (padded, rows) in enumerate(parts):
        values, lengths = features(padded, rows), np.array([LENGTHS[r] for r in rows])
        made = 2 * values + (1e-2 if off and number == 0 else 0) * (values != 0)
        if time_major:
            values, made = (np.ascontiguousarray(np.swapaxes(x, 0, 1)) for x in (values, made))
        given = {"microbatch": number, "name": ROOT}
        for kind in (Kind.INPUT, Kind.ACTIVATION):
            tensors += [({**given, "kind": kind, "slot": "in.0"}, values)]
            tensors += [({**given, "kind": kind, "slot": "in.1"}, lengths)]
        tensors += [({**given, "name": "double", "slot": "out"}, made.astype(np.float32))]
    return write_trace(judge.folder / f"own{next(judge.numbers)}", [tensors])


def test_another_padding_is_no_difference(judge: Judge) -> None:
    whole = recorded(judge, [(4, (0, 1, 2, 3))])
    assert_equivalent(judge(whole, recorded(judge, [(7, (0, 1, 2, 3))])))
    assert_equivalent(judge(whole, recorded(judge, [(6, (0, 2)), (3, (1, 3))])))
    assert_equivalent(judge(whole, recorded(judge, [(7, (0, 2, 1, 3))], time_major=True)))


def test_a_mistake_in_what_is_padded_otherwise_is_told(judge: Judge) -> None:
    whole = recorded(judge, [(4, (0, 1, 2, 3))])
    result = judge(whole, recorded(judge, [(6, (0, 2)), (3, (1, 3))], off=True))
    assert place(result)[2:] == (Kind.ACTIVATION, "double", "out")
    assert origins(result) == {("activation", "double")}
