"""Which of several copies is the odd one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.catalog import Catalog, Item
from tensortrace.diff.replicas import odd_ranks
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind, Mesh, Placement, Shard
from tests.synthetic import write_trace


def copies(folder: Path, *values: float, placement: Placement | None = None) -> tuple[Item, ...]:
    """Return one parameter as each rank holds it."""
    base = {"kind": Kind.PARAM, "name": "w", "slot": "model", "microbatch": None}
    shard = {r: Shard("ddp", (r,), (placement,)) if placement else None for r in range(len(values))}
    ranks = [[(base | {"shard": shard[r]}, np.array([1.0, v], np.float32))] for r, v in enumerate(values)]
    meshes = {"ddp": Mesh(("dp",), (len(values),), tuple(range(len(values))))}
    view = Catalog(Trace.open(write_trace(folder, ranks, meshes=meshes))).view(0)
    (items,) = view.items.values()
    return items


def test_equal_copies_have_no_odd_rank(tmp_path: Path) -> None:
    assert odd_ranks(copies(tmp_path / "b", 2, 2, 2)) == ()
    assert odd_ranks(()) == ()


@pytest.mark.parametrize(("values", "odd"), [((2, 2, 9, 2), (2,)), ((9, 2, 2), (0,)), ((2, 8, 2, 9), (1, 3))])
def test_the_odd_rank_is_the_one_outside_the_majority(
    tmp_path: Path, values: tuple[float, ...], odd: tuple[int, ...]
) -> None:
    assert odd_ranks(copies(tmp_path / "b", *values)) == odd


@pytest.mark.parametrize(("values", "odd"), [((2, 9), (1,)), ((9, 2), (0,))])
def test_without_a_majority_the_other_run_tells(
    tmp_path: Path, values: tuple[float, ...], odd: tuple[int, ...]
) -> None:
    like = copies(tmp_path / "a", 2.0000002)
    assert odd_ranks(copies(tmp_path / "b", *values), like) == odd


def test_where_nothing_tells_all_ranks_are_odd(tmp_path: Path) -> None:
    found = copies(tmp_path / "b", 7, 9)
    assert odd_ranks(found) == (0, 1)
    assert odd_ranks(found, copies(tmp_path / "a", 8)) == (0, 1)


def test_shards_and_partial_sums_are_no_replicas(tmp_path: Path) -> None:
    assert odd_ranks(copies(tmp_path / "b", 2, 9, placement=Placement("partial", op="sum"))) == ()
