"""Tensors read block by block are what they are as a whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Catalog, Item
from tensortrace.diff.factors import Factors, projected, rank_factors
from tensortrace.diff.quick import measure_quickly
from tensortrace.diff.stream import (
    LARGE_ELEMENTS,
    Same,
    Streamed,
    Sum,
    Term,
    Unread,
    Whole,
    block_of,
    block_size,
    one,
    paired,
    whole,
    zeros,
)
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import INIT_STEP, Entry, Kind, Mesh, Placement, Shard
from tests.synthetic import write_trace

WHOLE = np.arange(300 * 9000, dtype=np.float32).reshape(300, 9000)
MESH = {"tp": Mesh(("tp",), (2,), (0, 1))}


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Item]:
    """A tensor of two blocks and more, held in rows, in columns, as contributions, and in copies."""
    kinds = {
        "rows": (Placement("shard", dim=0), np.array_split(WHOLE, 2)),
        "columns": (Placement("shard", dim=1), np.array_split(WHOLE, 2, axis=1)),
        "partial": (Placement("partial", op="sum"), [WHOLE, WHOLE * 2]),
        "copies": (Placement("replicate"), [WHOLE, WHOLE]),
    }
    ranks = []
    for rank in range(2):
        tensors = []
        for name, (placement, values) in kinds.items():
            shard = Shard("tp", (rank,), (placement,), WHOLE.shape)
            fields = {"step": INIT_STEP, "microbatch": None, "kind": Kind.PARAM, "slot": "model"}
            tensors.append((fields | {"name": name, "shard": shard}, np.ascontiguousarray(values[rank])))
        ranks.append(tensors)
    trace = Trace.open(write_trace(tmp_path_factory.mktemp("stream") / "t", ranks, meshes=MESH))
    view = Catalog(trace).view(INIT_STEP)
    return {slot.name: found[0] for slot, found in view.items.items()}


@pytest.mark.parametrize(("name", "times"), [("rows", 1), ("columns", 1), ("partial", 3), ("copies", 1)])
def test_blocks_of_parts_are_those_of_the_tensor(items: dict[str, Item], name: str, times: int) -> None:
    found = list(one(items[name]).blocks())
    grid = [shape for _, shape in block_grid(WHOLE.shape, block_size(WHOLE.shape))]
    assert [b.shape for b in found] == grid
    assert len(found) > 2
    np.testing.assert_array_equal(np.concatenate(found), times * WHOLE.astype(np.float64))
    np.testing.assert_array_equal(next(one(items[name]).blocks(1)), found[1])


def test_a_sum_is_one_in_float64_and_a_tensor_alone_keeps_its_dtype(items: dict[str, Item]) -> None:
    total = Sum((Term(items["rows"], 2.0), Term(items["columns"], 1.0, 4.0)))
    assert total.read().dtype == np.float64
    np.testing.assert_array_equal(total.read(), 2.25 * WHOLE.astype(np.float64))
    np.testing.assert_array_equal(np.concatenate(list(total.scaled(2.0).blocks())), total.read() * 2)
    assert next(one(items["rows"]).blocks()).dtype == np.float32


def test_factors_are_fitted_from_blocks(items: dict[str, Item]) -> None:
    noise = 1e6 * np.random.default_rng(0).normal(size=WHOLE.shape)  # as large as the tensor
    target = 0.25 * WHOLE + 3.0 * noise
    found = rank_factors([({0: one(items["columns"]), 1: Whole(noise)}, Whole(target))])
    assert found is not None
    assert found.by_rank == pytest.approx({0: 0.25, 1: 3.0}, rel=1e-9)
    assert found.residual < 1e-7
    assert projected(one(items["rows"]), one(items["partial"])) == pytest.approx(3.0)
    assert projected(one(items["rows"]), zeros((3,))) is None


def test_only_large_tensors_stay_unread() -> None:
    small, large = zeros((4, 3)), zeros((LARGE_ELEMENTS + 1,))
    assert isinstance(paired(small, small), Assembled)
    streamed = paired(large, large)
    assert isinstance(streamed, Streamed)
    assert sum(x.size for x, _ in streamed.blocks()) == LARGE_ELEMENTS + 1
    with pytest.raises(NotComparable, match=r"\[4, 3\] in a"):
        paired(small, large)


def test_the_block_of_an_element_is_the_one_that_holds_it() -> None:
    index = (299, 8999)
    number = block_of(index, WHOLE.shape)
    assert next(Whole(WHOLE).blocks(number))[-1, -1] == WHOLE[index]


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Item]:
    """Two parameters of one content, a vector, and another parameter, on one rank."""
    arrays = {"one": WHOLE[:40, :50], "same": WHOLE[:40, :50], "vector": WHOLE[0, :60], "other": WHOLE[5:9]}
    fields = {"step": INIT_STEP, "microbatch": None, "kind": Kind.PARAM, "slot": "model"}
    tensors = [(fields | {"name": name}, np.ascontiguousarray(array)) for name, array in arrays.items()]
    trace = Trace.open(write_trace(tmp_path_factory.mktemp("alike") / "t", [tensors]))
    view = Catalog(trace).view(INIT_STEP)
    return {slot.name: found[0] for slot, found in view.items.items()}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all tensors that are read."""
    names: list[str] = []
    read = RankTrace.read

    def noted(rank: RankTrace, entry: Entry) -> np.ndarray:
        names.append(entry.name)
        return read(rank, entry)

    monkeypatch.setattr(RankTrace, "read", noted)
    return names


def test_of_one_content_the_norm_is_known_unread(alike: dict[str, Item], reads: list[str]) -> None:
    found = paired(one(alike["one"]), one(alike["same"]))
    assert isinstance(found, Same)
    assert found.norm == pytest.approx(np.linalg.norm(WHOLE[:40, :50].astype(np.float64)), rel=1e-14)
    assert found.nonfinite == 0
    assert reads == []


def test_another_content_and_a_scaled_one_are_read(alike: dict[str, Item]) -> None:
    assert isinstance(paired(one(alike["one"]), one(alike["one"]).scaled(2.0)), Assembled)
    assert isinstance(paired(one(alike["vector"]), one(alike["vector"])), Assembled)  # whose elements count


def test_gradients_that_are_what_they_were_have_the_factor_1_unread(
    alike: dict[str, Item], reads: list[str]
) -> None:
    samples = [({3: one(alike[name])}, one(alike[name])) for name in ("other", "one", "vector")]
    assert rank_factors(samples) == Factors({3: 1.0}, 0.0, 0.0)
    assert reads == ["vector"]  # one that is not 0, the smallest


def test_where_one_gradient_is_another_all_are_measured(alike: dict[str, Item]) -> None:
    found = rank_factors(({0: one(alike[n])}, one(alike[n]).scaled(0.5)) for n in ("one", "vector"))
    assert found is not None
    assert found.by_rank == pytest.approx({0: 0.5})


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Item], dict[str, np.ndarray]]:
    """A trace, and two parameters of several blocks of it that differ, stored as they are."""
    one_ = np.random.default_rng(4).standard_normal((800, 700), np.float32)
    arrays = {"one": one_, "other": one_ * np.float32(1.5), "vector": one_.reshape(-1)}
    fields = {"step": INIT_STEP, "microbatch": None, "kind": Kind.PARAM, "slot": "model"}
    tensors = [(fields | {"name": name}, array) for name, array in arrays.items()]
    root = write_trace(tmp_path_factory.mktemp("apart") / "t", [tensors], compress="none")
    view = Catalog(Trace.open(root)).view(INIT_STEP)
    return root, {slot.name: found[0] for slot, found in view.items.items()}, arrays


def test_what_differs_is_gone_through_before_it_is_held(
    apart: tuple[Path, dict[str, Item], dict[str, np.ndarray]], reads: list[str]
) -> None:
    _, held, arrays = apart
    found = paired(one(held["one"]), one(held["other"]))
    assert isinstance(found, Unread)
    blocks = list(found.blocks())
    assert len(blocks) > 1
    assert reads == []
    for side, name in enumerate(("one", "other")):
        np.testing.assert_array_equal(np.concatenate([sides[side] for sides in blocks]), arrays[name])
    read = whole(found)
    assert isinstance(read, Assembled)
    np.testing.assert_array_equal(read.b, arrays["other"])
    assert whole(read) is read


def test_of_vectors_elements_are_looked_at_so_they_are_read(
    apart: tuple[Path, dict[str, Item], dict[str, np.ndarray]],
) -> None:
    _, held, _ = apart
    vector = one(held["vector"])
    assert isinstance(paired(vector, vector.scaled(2.0)), Assembled)


def test_a_byte_that_is_wrong_is_told_before_anything_is_made_of_it(
    apart: tuple[Path, dict[str, Item], dict[str, np.ndarray]], tmp_path: Path
) -> None:
    root, _, arrays = apart
    shutil.copytree(root, tmp_path / "t")
    (segment,) = (tmp_path / "t").glob("rank*/seg*")
    held = segment.read_bytes()
    at = held.index(arrays["other"][-1, -4:].tobytes())  # in its last block
    segment.write_bytes(held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
    view = Catalog(Trace.open(tmp_path / "t")).view(INIT_STEP)
    items = {slot.name: found[0] for slot, found in view.items.items()}
    found = paired(one(items["one"]), one(items["other"]))
    with pytest.raises(DamagedTrace, match="another digest"):
        measure_quickly(found.shape, found.blocks, eps=2.0**-23, spacing=2.0**-23, terms=0.0)
