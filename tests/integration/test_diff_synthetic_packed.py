"""Rows that are packed: PackedSequences of recurrent networks, documents with numbers in a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.types import ROOT, Kind, Meta
from tests.integration.judged import Judge, codes, judge_in, place
from tests.synthetic import Tensor, write_trace

LENGTHS = (2, 4, 3, 1)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


def assert_agree(judge: Judge, a: Path, b: Path) -> None:
    """Assert that nothing diverges and nothing is missing but what is said to need no comparison."""
    result = judge(a, b)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete


def value(row: int, position: int) -> float:
    return 10.0 * row + position + 1


def packed(rows: list[int]) -> dict[str, np.ndarray]:
    """Return the fields of a PackedSequence of some rows: position by position, the longest row first."""
    order = sorted(range(len(rows)), key=lambda n: -LENGTHS[rows[n]])
    longest = LENGTHS[rows[order[0]]]
    cells = [(t, n) for t in range(longest) for n in order if LENGTHS[rows[n]] > t]
    return {
        "data": np.array([[value(rows[n], t)] for t, n in cells], dtype=np.float32),
        "batch_sizes": np.array([sum(LENGTHS[r] > t for r in rows) for t in range(longest)]),
        "sorted_indices": np.array(order),
        "unsorted_indices": np.argsort(order),
    }


def given_packed(judge: Judge, parts: list[list[int]], plant: str = "") -> Path:
    tensors: list[Tensor] = []
    for number, rows in enumerate(parts):
        ids = np.array([[100 + r] * 3 for r in rows])
        fields = packed(rows)
        if plant == "data" and number == 0:
            fields["data"][-1] += 1
        if plant == "lengths" and number == 0:  # the last position of the longest row is left out
            fields |= {"data": fields["data"][:-1], "batch_sizes": fields["batch_sizes"][:-1]}
        base = {"microbatch": number, "name": ROOT, "slot": "in.0"}
        tensors += [({**base, "kind": Kind.INPUT}, ids), ({**base, "kind": Kind.ACTIVATION}, ids)]
        named = {"microbatch": number, "name": "rnn", "kind": Kind.ACTIVATION}
        tensors += [({**named, "slot": f"in.0.{field}"}, found) for field, found in fields.items()]
    return write_trace(judge.folder / f"own{next(judge.numbers)}", [tensors])


@pytest.mark.parametrize("parts", [[[2, 0, 3, 1]], [[0, 1], [2, 3]], [[3], [1, 0], [2]]])
def test_packed_sequences_meet_row_by_row(judge: Judge, parts: list[list[int]]) -> None:
    assert_agree(judge, given_packed(judge, [[0, 1, 2, 3]]), given_packed(judge, parts))


def test_what_is_packed_wrongly_is_told(judge: Judge) -> None:
    whole = given_packed(judge, [[0, 1, 2, 3]])
    assert place(judge(whole, given_packed(judge, [[0, 1], [2, 3]], "data")))[3:] == ("rnn", "in.0.data")
    assert place(judge(whole, given_packed(judge, [[0, 1], [2, 3]], "lengths")))[3] == "rnn"


DOCUMENTS = {"a": [5, 6, 7], "b": [8, 9], "c": [10, 11, 12, 13], "d": [14, 15]}


def documents(judge: Judge, rows: list[str], length: int, plant: str = "") -> Path:
    """Return a trace of rows of documents, with their positions, and numbers from 0 in each row."""
    ids, positions, numbers = (np.zeros((len(rows), length), dtype=np.int64) for _ in range(3))
    for row, names in enumerate(rows):
        at = 0
        for number, name in enumerate(names):
            stop = at + len(DOCUMENTS[name])
            ids[row, at:stop] = DOCUMENTS[name]
            positions[row, at:stop] = np.arange(stop - at)
            numbers[row, at:stop] = number
            at = stop
        numbers[row, at:] = len(names)
    if plant:  # the second document of the first row counts as part of the first
        numbers[0][numbers[0] == 1] = 0
    tensors: list[Tensor] = []
    for kind in (Kind.INPUT, Kind.ACTIVATION):
        for slot, found in enumerate((ids, positions, numbers)):
            tensors.append(({"name": ROOT, "kind": kind, "slot": f"in.{slot}"}, found))
    target = {"kind": Kind.LOSS, "name": "cross_entropy", "slot": "target"}
    target |= {"meta": Meta(ignore_index=-100)}
    tensors.append((target, np.where(ids == 0, -100, ids)))
    return write_trace(judge.folder / f"own{next(judge.numbers)}", [tensors])


@pytest.mark.parametrize(("rows", "length"), [(["cd", "ab"], 7), (["a", "b", "c", "d"], 5), (["abcd"], 13)])
def test_numbers_of_documents_name_them_only(judge: Judge, rows: list[str], length: int) -> None:
    assert_agree(judge, documents(judge, ["ab", "cd"], 7), documents(judge, rows, length))


def test_documents_that_share_a_number_are_told(judge: Judge) -> None:
    result = judge(documents(judge, ["ab", "cd"], 7), documents(judge, ["cd", "ab"], 7, "shared"))
    assert place(result)[3:] == (ROOT, "in.2")
    assert codes(result)[:1] == ["input.different"]
