"""Parts put together: random layouts give back the tensor, and each corruption is named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tensortrace.tracer.geometry import Held, LayoutError, Region, full_region, held
from tensortrace.tracer.geometry_blocks import block_grid, blocks, fill, place
from tensortrace.tracer.geometry_cover import check, copies, odd_replicas, one_copy, replica_sets
from tensortrace.tracer.types import Box, Mesh, Placement, Shard


class Sharded(NamedTuple):
    """A global tensor and what every rank of a mesh holds of it."""

    whole: np.ndarray
    arrays: dict[int, np.ndarray]
    parts: list[Held]


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks)


def _chunk(array: np.ndarray, count: int, index: int, dim: int) -> np.ndarray:
    size = -(-array.shape[dim] // count)
    starts = [min(k * size, array.shape[dim]) for k in range(1, count)]
    return np.split(array, starts, axis=dim)[index]


def _local(array: np.ndarray, placement: Placement, count: int, index: int) -> np.ndarray:
    dim = placement.dim or 0
    if placement.kind == "shard":
        return _chunk(array, count, index, dim)
    if placement.kind == "strided_shard":
        pieces = [
            _chunk(array, placement.split_factor or 1, k, dim) for k in range(placement.split_factor or 1)
        ]
        return np.concatenate([_chunk(piece, count, index, dim) for piece in pieces], axis=dim)
    return array


@st.composite
def placements(draw: st.DrawFn, dims: int) -> Placement:
    kind = draw(
        st.sampled_from(["replicate", "shard", "strided_shard", "partial"] if dims else ["replicate"])
    )
    if kind == "partial":
        return Placement(kind="partial", op=draw(st.sampled_from(["sum", "avg"])))
    if kind == "replicate":
        return Placement(kind="replicate")
    dim = draw(st.integers(0, dims - 1))
    factor = draw(st.integers(1, 3)) if kind == "strided_shard" else None
    return Placement(kind=kind, dim=dim, split_factor=factor)  # type: ignore[arg-type]


@st.composite
def sharded(draw: st.DrawFn) -> Sharded:
    """Cut a tensor of distinct whole numbers over a mesh; contributions are multiples that add up."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    chosen = tuple(draw(placements(len(shape))) for _ in sizes)
    padding = tuple(draw(st.integers(0, 2)) for _ in shape) if draw(st.booleans()) else ()
    base = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    mesh = Mesh(axes=tuple("xyz"[: len(sizes)]), shape=sizes, ranks=tuple(range(math.prod(sizes))))
    arrays, parts, weights = {}, [], Counter[tuple[int, ...]]()
    for rank, here in enumerate(product(*map(range, sizes))):
        local, weight = base, 1.0
        for placement, count, index in zip(chosen, sizes, here, strict=True):
            local = _local(local, placement, count, index)
            if placement.kind == "partial":
                weight *= (index + 1) / (count if placement.op == "avg" else 1)
                local = local * (index + 1)
        weights[tuple(i for i, p in zip(here, chosen, strict=True) if p.kind == "partial")] = weight  # type: ignore[assignment]
        arrays[rank] = np.pad(local, [(0, p) for p in padding], constant_values=-7.0) if padding else local
        stated = Shard("m", here, chosen, shape, (), padding)
        parts.append(held(rank, stated, mesh, arrays[rank].shape))
    return Sharded(base * sum(weights.values()), arrays, parts)


@st.composite
def flattened(draw: st.DrawFn) -> Sharded:
    """Cut a flattened tensor at random places, some parts empty or padded, as flat parameters are."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    size = math.prod(shape)
    count = draw(st.integers(1, 4))
    copies = draw(st.integers(1, 2))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))), size]
    whole = np.arange(size, dtype=np.int32).reshape(shape)
    mesh = Mesh(axes=("r", "f"), shape=(copies, count), ranks=tuple(range(copies * count)))
    arrays, parts = {}, []
    for rank, (copy, here) in enumerate(product(range(copies), range(count))):
        pad = draw(st.integers(0, 2))
        arrays[rank] = np.pad(whole.reshape(-1)[cuts[here] : cuts[here + 1]], (0, pad), constant_values=-1)
        box = Box((cuts[here],), (cuts[here + 1] - cuts[here],))
        axes = (Placement(kind="replicate"), Placement(kind="flat"))
        stated = Shard("m", (copy, here), axes, shape, (box,), (pad,) if pad else ())
        parts.append(held(rank, stated, mesh, arrays[rank].shape))
    return Sharded(whole, arrays, parts)


@examples(1200)
@given(sharded(), st.integers(1, 30))
def test_random_placements_give_back_the_tensor_whole_and_in_blocks(case: Sharded, most: int) -> None:
    assert check(case.parts) == ()
    np.testing.assert_allclose(place(case.arrays, case.parts), case.whole, rtol=1e-12)
    _check_blocks(case, most)


@examples(300)
@given(flattened(), st.integers(1, 30))
def test_flat_intervals_give_back_the_tensor_whole_and_in_blocks(case: Sharded, most: int) -> None:
    assert check(case.parts) == ()
    np.testing.assert_array_equal(place(case.arrays, case.parts), case.whole)
    _check_blocks(case, most)


def _check_blocks(case: Sharded, most: int) -> None:
    def read(rank: int, start: int, stop: int) -> np.ndarray:
        return case.arrays[rank].reshape(-1)[start:stop]

    at, flat = 0, case.whole.reshape(-1)
    for block in blocks(case.parts, most):
        assert block.start == at
        assert block.stop - block.start == math.prod(block.shape) <= most
        np.testing.assert_allclose(fill(block, read).reshape(-1), flat[at : block.stop], rtol=1e-12)
        at = block.stop
    assert at == flat.size


@examples(250)
@given(st.one_of(sharded(), flattened()), st.data())
def test_a_part_that_nobody_holds_is_a_hole_with_its_range(case: Sharded, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(replica_sets(case.parts)))
    left = [p for p in case.parts if p.rank not in lost.ranks]
    assume(left)
    holes = [p for p in check(left) if p.kind == "hole"]
    assert {(p.dims, p.partial) for p in holes} == {(lost.region.dims, lost.partial)}
    assert all(p.ranks == tuple(sorted(part.rank for part in left)) for p in holes)
    assert holes
    with pytest.raises(LayoutError):
        place(case.arrays, left)


@examples(150)
@given(st.one_of(sharded(), flattened()), st.data())
def test_a_part_that_reaches_into_another_is_an_overlap_naming_both(
    case: Sharded, data: st.DataObject
) -> None:
    wide = data.draw(st.sampled_from([p for p in case.parts if p.region.size]))
    whole = (math.prod(wide.region.global_shape),) if wide.region.flat else wide.region.global_shape
    assume(not wide.region.whole)
    dims = tuple(((0, size),) for size in whole)
    moved = replace(wide, region=Region(wide.region.global_shape, dims, wide.region.flat))
    found = check([moved if p is wide else p for p in case.parts])
    overlaps = [p for p in found if p.kind == "overlap"]
    others = {p.rank for p in case.parts if p is not wide and p.region.size and p.partial == wide.partial}
    assert overlaps or not others
    assert all(wide.rank in p.ranks for p in overlaps)
    assert {rank for p in overlaps for rank in p.ranks} - {wide.rank} == others


@examples(100)
@given(st.one_of(sharded(), flattened()), st.data())
def test_a_replica_of_other_values_is_named(case: Sharded, data: st.DataObject) -> None:
    sets = [s for s in replica_sets(case.parts) if len(s.ranks) > 1]
    assume(sets)
    chosen = data.draw(st.sampled_from(sets))
    odd = data.draw(st.sampled_from(chosen.ranks))
    found = odd_replicas(case.parts, {p.rank: "x" if p.rank == odd else "o" for p in case.parts})
    assert [p.kind for p in found] == ["odd"]
    assert found[0].ranks == ((odd,) if len(chosen.ranks) > 2 else chosen.ranks)
    assert found[0].dims == chosen.region.dims


def _rows(rank: int, *intervals: tuple[int, int], rows: int = 8) -> Held:
    region = Region((rows, 3), (intervals, ((0, 3),)))
    return Held(rank, region, region.shape)


def test_the_problems_say_ranks_and_ranges() -> None:
    parts = [_rows(0, (0, 4)), _rows(1, (3, 6)), _rows(2, (7, 8))]
    assert [str(p) for p in check(parts)] == [
        "ranks 0, 1 hold [3:4, 0:3], though their parts differ",
        "no rank holds [6:7, 0:3] (ranks 0, 1, 2 hold other parts)",
    ]
    parts = [_rows(0, (0, 4)), _rows(1, (4, 8)), _rows(2, (0, 4))]
    assert [str(p) for p in check(parts)] == ["[4:8, 0:3] is held by rank 1 alone, other parts by 2 ranks"]
    assert copies(parts) == 1
    assert [p.rank for p in one_copy(parts, 1)] == [2, 1]


def test_ranks_that_disagree_on_the_whole_are_named() -> None:
    found = check([_rows(0, (0, 4)), _rows(1, (4, 8)), _rows(2, (0, 4), rows=9)])
    assert [p.ranks for p in found] == [(2,)]
    assert "global shape (9, 3), others have global shape (8, 3)" in str(found[0])


def test_a_missing_contribution_is_a_hole() -> None:
    whole = full_region((2, 2))
    parts = [Held(rank, whole, (2, 2), (rank,), (3,), ("sum",)) for rank in (0, 2)]
    assert [(p.kind, p.partial) for p in check(parts)] == [("hole", (1,))]


def test_contributions_are_summed_in_float64_and_integers_stay_whole() -> None:
    whole = full_region((2,))
    parts = [Held(rank, whole, (2,), (rank,), (2,), ("sum",)) for rank in (0, 1)]
    small = np.array([1.0, 2.0**-40], np.float32)
    np.testing.assert_array_equal(
        place({0: small, 1: np.array([2.0**-40, 1.0], np.float32)}, parts), [1 + 2.0**-40] * 2
    )
    total = place({0: np.array([2**53, 1]), 1: np.array([1, 1])}, parts)
    assert total.tolist() == [2**53 + 1, 2]
    greatest = [replace(p, ops=("max",)) for p in parts]
    assert place({0: np.array([1.0, 5.0]), 1: np.array([3.0, 2.0])}, greatest).tolist() == [3.0, 5.0]


def test_thousands_of_ranks_are_checked_on_borders_alone() -> None:
    size = 1 << 40
    parts = []
    for row, column in product(range(64), range(64)):
        dims = (((row * size, (row + 1) * size),), ((column * 7, column * 7 + 7),))
        parts.append(Held(row * 64 + column, Region((64 * size, 64 * 7), dims), (size, 7)))
    assert check(parts) == ()
    assert [p.dims for p in check(parts[:-1])] == [(((63 * size, 64 * size),), ((441, 448),))]


def test_the_grid_of_blocks_is_the_same_for_any_layout_and_never_too_large() -> None:
    grid = list(block_grid((3, 4, 5), 12))
    assert grid[:3] == [((0, 0, 0), (1, 2, 5)), ((0, 2, 0), (1, 2, 5)), ((1, 0, 0), (1, 2, 5))]
    assert [shape for _, shape in block_grid((1, 1, 9), 4)] == [(1, 1, 4), (1, 1, 4), (1, 1, 1)]
    assert list(block_grid((), 4)) == [((), ())]
    assert list(block_grid((3, 0), 4)) == []
