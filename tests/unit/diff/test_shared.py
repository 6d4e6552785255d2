"""Blocks that all ranks have beside split ones are equal on all of them, but for round-off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.replicas import odd_members
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests.synthetic import write_trace

Q = np.linspace(1.0, 2.0, 24, dtype=np.float32).reshape(6, 4)
K = np.linspace(3.0, 4.0, 8, dtype=np.float32).reshape(2, 4)
LAYOUT = 'format = 1\naxes = { tp = 3 }\nrule = [{ name = "w", dims = "(q[tp]|k) i", sizes = { k = 2 } }]\n'


def odd_ranks(folder: Path, kind: Kind, *keys: np.ndarray) -> tuple[int, ...]:
    """Return the ranks whose copy of the key is odd; whatever it is, the queries make a whole tensor."""
    microbatch = 0 if kind == Kind.LOCAL_GRAD else None
    fields = {"kind": kind, "name": "w", "slot": "model", "microbatch": microbatch}
    parts = [np.concatenate([Q[2 * rank : 2 * rank + 2], key]) for rank, key in enumerate(keys)]
    trace = Trace.open(write_trace(folder / "b", [[(fields, part)] for part in parts]))
    (folder / "layout.toml").write_text(LAYOUT)
    [items] = Catalog(laid_out(trace, folder / "layout.toml")[0]).view(0).items.values()
    assert items[0].read().shape == (8, 4)
    return odd_members(items)


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.LOCAL_GRAD])
def test_equal_copies_leave_nobody_out(tmp_path: Path, kind: Kind) -> None:
    assert odd_ranks(tmp_path, kind, K, K, K) == ()


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.LOCAL_GRAD])
def test_the_rank_whose_copy_differs_is_named(tmp_path: Path, odd: int, kind: Kind) -> None:
    keys = [K + np.float32(0.01 * (rank == odd)) for rank in range(3)]
    assert odd_ranks(tmp_path, kind, *keys) == (odd,)


def test_another_order_of_summation_is_no_disagreement(tmp_path: Path) -> None:
    rounded = K * np.float32(1 + 2.0**-22)
    assert (rounded != K).any()
    assert odd_ranks(tmp_path, Kind.LOCAL_GRAD, K, rounded, K) == ()


def test_a_part_is_read_under_whatever_name_it_goes_by_later(tmp_path: Path) -> None:
    fields = {"kind": Kind.PARAM, "name": "w", "slot": "model", "microbatch": None}
    trace = Trace.open(write_trace(tmp_path / "b", [[(fields, Q)], [(fields, Q)]]))
    rule = '{ name = "w", dims = "v[tp] i", sizes = { v = 12 }, valid = { v = 7 } }'
    (tmp_path / "layout.toml").write_text(f"format = 1\naxes = {{ tp = 2 }}\nrule = [{rule}]\n")
    rank = laid_out(trace, tmp_path / "layout.toml")[0].ranks[1]
    [entry] = rank.entries
    assert np.array_equal(rank.read(replace(entry, name="tied")), Q[:1])
