"""Where sizes cannot tell how rows lie in a dimension, the values decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.diff.assemble import NotComparable, by_rows
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.engine import compare
from tensortrace.diff.pairing import pair
from tensortrace.diff.rows import read_batch
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests.synthetic import write_trace

X = np.arange(8.0).reshape(4, 2).astype("f4")  # four samples of two features


def _rank(rows: np.ndarray, out: np.ndarray) -> list[Any]:
    inputs = {"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}
    return [(inputs, rows), ({"kind": Kind.ACTIVATION, "name": "m", "slot": "out"}, out)]


def _assembled(folder: Path, out: Any) -> tuple[np.ndarray, np.ndarray]:
    one = write_trace(folder / "a", [_rank(X, out(X))])
    two = write_trace(folder / "b", [_rank(X[:2], out(X[:2])), _rank(X[2:], out(X[2:]))])
    with Trace.open(one) as trace_a, Trace.open(two) as trace_b:
        views = [Catalog(t).view(0) for t in (trace_a, trace_b)]
        pairing = pair(*(read_batch(view, "train") for view in views))
        items = [next(found for slot, found in v.items.items() if slot.name == "m") for v in views]
        loaded = by_rows(*items, pairing)
    return loaded.a, loaded.b


def test_rows_flattened_with_their_features_meet(tmp_path: Path) -> None:
    a, b = _assembled(tmp_path, lambda x: x.reshape(-1))
    np.testing.assert_array_equal(a, b)


def test_batches_concatenated_one_after_the_other_meet(tmp_path: Path) -> None:
    a, b = _assembled(tmp_path, lambda x: np.concatenate([x, -x]))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("statistic", [np.sum, np.mean])
def test_numbers_of_all_rows_meet_as_sums_or_means(tmp_path: Path, statistic: Any) -> None:
    a, b = _assembled(tmp_path, statistic)
    assert a.shape == b.shape == ()
    assert b == a == statistic(X)


def test_numbers_that_no_split_keeps_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(NotComparable):
        _assembled(tmp_path, np.max)


def test_a_form_that_only_one_run_gives_is_not_compared(tmp_path: Path) -> None:
    """Such as positions of a row, in the other run those of all rows."""
    with pytest.raises(NotComparable, match="local shapes"):
        _assembled(tmp_path, lambda x: x[0] if len(x) == 4 else x)


TOKENS = np.arange(12).reshape(4, 3)


def test_positions_that_one_rank_alone_numbers_otherwise_are_compared_rank_by_rank(tmp_path: Path) -> None:
    def positions(shift: int) -> tuple[dict[str, Any], np.ndarray]:
        return {"kind": Kind.ACTIVATION, "name": "m", "slot": "in.0"}, np.arange(3) + shift

    def given(rows: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        return {"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, rows

    one = write_trace(tmp_path / "a", [[given(TOKENS), positions(0)]])
    two = write_trace(tmp_path / "b", [[given(TOKENS[:2]), positions(0)], [given(TOKENS[2:]), positions(1)]])
    result = compare(one, two)
    assert result.first_divergent is not None
    assert (result.first_divergent.where.name, result.first_divergent.ranks) == ("m", (1,))
    assert [(c.code, c.number) for c in result.causes] == [("position.shifted", 1.0)]


def test_passes_that_give_tensors_of_several_forms_meet_form_by_form(tmp_path: Path) -> None:
    """One microbatch is asked for two numbers a row, the next for their sum."""
    later = X + 100

    def rank(rows: slice, odd: float = 0.0) -> list[Any]:
        found = [*_rank(X[rows], X[rows]), *_rank(later[rows], later[rows].sum(1) + np.float32(odd))]
        return [(fields | {"microbatch": n // 2}, value) for n, (fields, value) in enumerate(found)]

    for odd in (0.0, 1.0):
        one = write_trace(tmp_path / f"a{odd}", [rank(slice(0, 4))])
        two = write_trace(tmp_path / f"b{odd}", [rank(slice(0, 2)), rank(slice(2, 4), odd)])
        with Trace.open(one) as trace_a, Trace.open(two) as trace_b:
            views = [Catalog(t).view(0) for t in (trace_a, trace_b)]
            pairing = pair(*(read_batch(view, "train") for view in views))
            loaded = by_rows(*(view.items[view.named(Kind.ACTIVATION, "m")[0]] for view in views), pairing)
        np.testing.assert_array_equal(loaded.a, [*later.sum(1), *X.ravel()])
        np.testing.assert_array_equal(loaded.b - loaded.a, [0, 0, odd, odd, *[0] * 8])
        assert [row.number for row in loaded.owners] == [0, 1, 0, 1, 0, 1, 0, 1]
        assert loaded.lengths == (1, 1, 1, 1, 2, 2, 2, 2)
