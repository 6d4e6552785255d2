"""Rows meet by what they hold, whatever the split, the order and the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.pairing import duplicated_across_ranks, pair
from tensortrace.diff.rows import Batch, read_batch, read_batches
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind, Meta
from tests.synthetic import write_trace

PAD, IGNORE = 99, -100


def _pass(documents: list[list[int]], microbatch: int, width: int, *, left: bool = False) -> list[Any]:
    """Return the input and the loss target of one microbatch, documents padded to ``width``."""
    ids, targets = [], []
    for document in documents:
        fill = width - len(document)
        padded, target = [PAD] * fill, [IGNORE] * fill
        ids.append(padded + document if left else document + padded)
        targets.append(target + document if left else document + target)
    common = {"microbatch": microbatch}
    return [
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0", **common}, np.array(ids)),
        (
            {
                "kind": Kind.LOSS,
                "name": "cross_entropy",
                "slot": "target",
                "meta": Meta(ignore_index=IGNORE),
                **common,
            },
            np.array(targets).reshape(-1),
        ),
    ]


def _batch(folder: Path, *ranks: list[Any]) -> Batch:
    with Trace.open(write_trace(folder, ranks)) as trace:
        return read_batch(Catalog(trace).view(0), "train")


def test_rows_meet_across_world_sizes_orders_and_padded_lengths(tmp_path: Path) -> None:
    one = _batch(tmp_path / "a", _pass([[1, 2, 3], [4, 5], [6]], 0, 5))
    two = _batch(tmp_path / "b", _pass([[6]], 0, 2), _pass([[1, 2, 3], [4, 5]], 0, 3))
    pairing = pair(one, two)
    assert not pairing.only_a
    assert not pairing.only_b
    assert not pairing.by_order
    met = [(y.part.rank, y.number, y.start, y.stop) for _, y in pairing.pairs]
    assert met == [(1, 0, 0, 3), (1, 1, 0, 2), (0, 0, 0, 1)]


def test_left_padding_is_cut_away_too(tmp_path: Path) -> None:
    right = _batch(tmp_path / "a", _pass([[1, 2, 3], [4, 5]], 0, 4))
    left = _batch(tmp_path / "b", _pass([[1, 2, 3], [4, 5]], 0, 6, left=True))
    pairing = pair(right, left)
    assert [(x.start, x.stop, y.start, y.stop) for x, y in pairing.pairs] == [(0, 3, 3, 6), (0, 2, 4, 6)]


def test_rows_that_do_not_match_are_paired_by_order_and_said_so(tmp_path: Path) -> None:
    a = _batch(tmp_path / "a", _pass([[1, 2], [3, 4]], 0, 2))
    b = _batch(tmp_path / "b", _pass([[1, 2], [3, 5]], 0, 2))
    pairing = pair(a, b)
    assert pairing.by_order
    assert [(x.number, y.number) for x, y in pairing.pairs] == [(0, 0), (1, 1)]


def test_equal_rows_match_as_a_multiset(tmp_path: Path) -> None:
    a = _batch(tmp_path / "a", _pass([[1, 2], [1, 2], [3]], 0, 2))
    b = _batch(tmp_path / "b", _pass([[1, 2]], 0, 2), _pass([[3], [1, 2]], 0, 2))
    pairing = pair(a, b)
    assert len(pairing.pairs) == 3
    assert not pairing.by_order


def test_rows_that_two_ranks_repeat_are_found(tmp_path: Path) -> None:
    a = _batch(tmp_path / "a", _pass([[1, 2], [3, 4]], 0, 2))
    b = _batch(tmp_path / "b", _pass([[1, 2]], 0, 2), _pass([[1, 2]], 0, 2))
    assert {row.part.rank for row in duplicated_across_ranks(a, b)} == {0, 1}
    assert not duplicated_across_ranks(a, a)


def test_a_split_over_microbatches_is_not_the_same_split(tmp_path: Path) -> None:
    a = _batch(tmp_path / "a", _pass([[1, 2], [3, 4]], 0, 2))
    b = _batch(tmp_path / "b", _pass([[1, 2]], 0, 2) + _pass([[3, 4]], 1, 2))
    assert not pair(a, b).same_split()
    assert pair(a, a).same_split()


def _packed(documents: list[list[int]], microbatch: int) -> list[Any]:
    """Return what a program is given that puts documents one after the other, without a dimension of rows."""
    ends = np.cumsum([0, *map(len, documents)])
    values = {
        "in.0": np.concatenate([np.array(d) for d in documents]),
        "in.1": np.concatenate([np.arange(len(d)) for d in documents]),
        "in.2": ends.astype(np.int32),
    }
    targets = np.concatenate([np.array([*d[1:], IGNORE]) for d in documents])
    inputs = [
        ({"kind": Kind.INPUT, "name": "(root)", "slot": slot, "microbatch": microbatch}, value)
        for slot, value in values.items()
    ]
    loss = {"kind": Kind.LOSS, "name": "cross_entropy", "slot": "target", "microbatch": microbatch}
    return [*inputs, (loss | {"meta": Meta(ignore_index=IGNORE)}, targets)]


def test_documents_one_after_the_other_meet_whatever_the_packing(tmp_path: Path) -> None:
    documents = [[7, 8, 9], [7, 8], [5, 8, 9, 9], [8, 8, 9]]  # tokens that repeat at the same positions
    one = _batch(tmp_path / "a", _packed(documents, 0))
    two = _batch(tmp_path / "b", _packed(documents[2:], 0), _packed(documents[:2], 0))
    found = pair(one, two)
    assert not found.only_a
    assert not found.only_b
    assert [(x.start, x.stop) for x, _ in found.pairs] == [(0, 3), (3, 5), (5, 9), (9, 12)]
    assert [(y.part.rank, y.start, y.stop) for _, y in found.pairs] == [
        (1, 0, 3),
        (1, 3, 5),
        (0, 0, 4),
        (0, 4, 7),
    ]


def _features(samples: list[np.ndarray]) -> list[Any]:
    """Return what a model of float features is given: samples padded with zeros, and their mask."""
    longest = max(map(len, samples))
    features = np.stack([np.pad(s, ((0, longest - len(s)), (0, 0))) for s in samples])
    mask = np.stack([np.arange(longest) < len(s) for s in samples]).astype("f4")
    common = {"kind": Kind.INPUT, "name": "(root)"}
    return [(common | {"slot": "in.0"}, features), (common | {"slot": "in.1"}, mask)]


def test_samples_of_features_meet_whatever_their_mask_is_padded_to(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=(length, 2)).astype("f4") for length in (2, 5, 3, 4)]
    one = _batch(tmp_path / "a", _features(samples))
    two = _batch(tmp_path / "b", _features(samples[2:]), _features(samples[:2]))
    found = pair(one, two)
    assert not found.by_order
    assert [(x.start, x.stop) for x, _ in found.pairs] == [(0, 2), (0, 5), (0, 3), (0, 4)]
    assert [(y.part.rank, y.number) for _, y in found.pairs] == [(1, 0), (1, 1), (0, 0), (0, 1)]


def test_padding_that_one_run_trains_on_is_known_from_the_other(tmp_path: Path) -> None:
    given, _ = _pass([[1, 2, 3], [4, 5]], 0, 5)
    ids = [[1, 2, 3, PAD], [4, 5, PAD, PAD]]  # padded otherwise, and no label of b is ignored
    wanted = {"kind": Kind.LOSS, "name": "cross_entropy", "slot": "target", "microbatch": 0}
    trained = [
        ({**given[0], "microbatch": 0}, np.array(ids)),
        ({**wanted, "meta": Meta(ignore_index=IGNORE)}, np.array(ids).reshape(-1)),
    ]
    with (
        Trace.open(write_trace(tmp_path / "a", [_pass([[1, 2, 3], [4, 5]], 0, 5)])) as a,
        Trace.open(write_trace(tmp_path / "b", [trained])) as b,
    ):
        pairing = pair(*read_batches(Catalog(a).view(0), Catalog(b).view(0), "train"))
    assert not pairing.by_order
    assert [(y.start, y.stop) for _, y in pairing.pairs] == [(0, 3), (0, 2)]


def test_a_mask_that_has_no_name_is_known_by_what_it_leaves_out(tmp_path: Path) -> None:
    def given(documents: list[list[int]], width: int) -> list[Any]:
        ids = np.array([row + [PAD] * (width - len(row)) for row in documents])
        common = {"kind": Kind.INPUT, "name": "(root)", "microbatch": 0}
        return [(common | {"slot": "in.0"}, ids), (common | {"slot": "in.1"}, (ids != PAD).astype("i8"))]

    one = _batch(tmp_path / "a", given([[1, 2, 3], [4, 5]], 5))
    two = _batch(tmp_path / "b", given([[4, 5]], 2), given([[1, 2, 3]], 4))
    found = pair(one, two)
    assert not found.by_order
    assert [(x.start, x.stop) for x, _ in found.pairs] == [(0, 3), (0, 2)]
