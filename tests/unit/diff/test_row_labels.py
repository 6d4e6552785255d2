"""Labels that number rows of the batch name the same rows in another order."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Part
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.plan.labels import as_rows
from tensortrace.diff.rows import Row


def rows(orders: list[list[int]]) -> dict[int, Row]:
    """Return the row of each sample, dealt to ranks as ``orders`` says."""
    return {
        sample: Row(Part(rank, "train", 0), number, 0, 1, bytes([sample]))
        for rank, samples in enumerate(orders)
        for number, sample in enumerate(samples)
    }


def compared(labels_b: dict[int, int], orders: list[list[int]]) -> Assembled:
    """Return labels that are each row's own number in ``a``, against those of ``b`` by sample."""
    of_a, of_b = rows([[0, 1, 2, 3]]), rows(orders)
    pairs = tuple((of_a[sample], of_b[sample]) for sample in range(4))
    loaded = Assembled(np.arange(4), np.array([labels_b[s] for s in range(4)]), tuple(y for _, y in pairs))
    return as_rows(loaded, Pairing(pairs, (), ()))


def test_numbers_in_what_ranks_gather_are_the_rows_numbers() -> None:
    found = compared({0: 0, 2: 1, 1: 2, 3: 3}, [[0, 2], [1, 3]])
    assert found.b.tolist() == [0, 1, 2, 3]


def test_numbers_within_a_rank_are_the_rows_numbers() -> None:
    found = compared({0: 0, 2: 1, 1: 0, 3: 1}, [[0, 2], [1, 3]])
    assert found.b.tolist() == [0, 1, 2, 3]


def test_numbers_of_other_rows_stay() -> None:
    found = compared({0: 1, 2: 0, 1: 2, 3: 3}, [[0, 2], [1, 3]])
    assert found.b.tolist() == [1, 2, 0, 3]
