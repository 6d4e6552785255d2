"""Which elements a shard holds: hand-written cases, and torch's own rules for DTensor."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.distributed.tensor import placement_types
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from tensortrace.tracer.geometry import LayoutError, Region, held, region
from tensortrace.tracer.types import Box, Mesh, Placement, Shard

REPLICATE = Placement(kind="replicate")


def shard(dim: int) -> Placement:
    return Placement(kind="shard", dim=dim)


def strided(dim: int, split_factor: int) -> Placement:
    return Placement(kind="strided_shard", dim=dim, split_factor=split_factor)


def mesh_of(*shape: int) -> Mesh:
    axes = tuple(f"axis{number}" for number in range(len(shape)))
    return Mesh(axes=axes, shape=shape, ranks=tuple(range(math.prod(shape))))


def found(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    *placements: Placement,
    local: tuple[int, ...],
    boxes: tuple[Box, ...] = (),
    padding: tuple[int, ...] = (),
) -> Region:
    stated = Shard("mesh", coordinate, placements, shape, boxes, padding)
    return region(stated, mesh_of(*sizes), local)


def test_thirteen_rows_over_two_ranks_are_seven_and_six() -> None:
    assert found((13, 2), (2,), (0,), shard(0), local=(7, 2)).dims == (((0, 7),), ((0, 2),))
    assert found((13, 2), (2,), (1,), shard(0), local=(6, 2)).dims == (((7, 13),), ((0, 2),))


def test_five_rows_over_four_ranks_leave_the_last_one_empty() -> None:
    assert found((5, 3), (4,), (2,), shard(0), local=(1, 3)).dims[0] == ((4, 5),)
    assert found((5, 3), (4,), (3,), shard(0), local=(0, 3)).size == 0
    assert found((5, 3), (4,), (3,), shard(0), local=(0,)).size == 0


def test_fsdp_of_a_tensor_parallel_weight_is_strided() -> None:
    starts = [
        found((12, 5), (2, 2), place, strided(0, 2), shard(0), local=(3, 5)).dims[0]
        for place in product(range(2), range(2))
    ]
    assert starts == [((0, 3),), ((6, 9),), ((3, 6),), ((9, 12),)]


def test_a_strided_shard_alone_holds_several_intervals() -> None:
    assert found((8,), (2,), (1,), strided(0, 2), local=(4,)).dims == (((2, 4), (6, 8)),)


def test_two_axes_may_cut_one_dimension_one_after_the_other() -> None:
    assert found((5,), (2, 2), (0, 1), shard(0), shard(0), local=(1,)).dims == (((2, 3),),)


def test_boxes_say_what_placements_cannot() -> None:
    zigzag = (Box((0, 0), (2, 3)), Box((6, 0), (2, 3)))
    got = found((8, 3), (2,), (0,), shard(0), local=(4, 3), boxes=zigzag)
    assert got.dims == (((0, 2), (6, 8)), ((0, 3),))
    grid = tuple(Box((r, c), (1, 2)) for r in (0, 3) for c in (0, 4))
    got = found((8, 6), (1,), (0,), shard(0), local=(2, 4), boxes=grid)
    assert got.dims == (((0, 1), (3, 4)), ((0, 2), (4, 6)))


def test_a_flat_part_is_an_interval_of_the_flattened_tensor() -> None:
    flat = Placement(kind="flat")
    got = found((4, 5), (2,), (1,), flat, local=(9,), boxes=(Box((7,), (7,)),), padding=(2,))
    assert (got.flat, got.dims, got.size) == (True, (((7, 14),),), 7)


def test_padding_is_no_part_of_the_region() -> None:
    assert found((50, 4), (4,), (3,), shard(0), local=(13, 4), padding=(2, 0)).dims[0] == ((39, 50),)


def test_without_a_global_shape_what_is_not_cut_is_whole() -> None:
    stated = Shard("dp", (1,), (Placement(kind="data"),))
    assert region(stated, mesh_of(2), (3, 4)) == Region((3, 4), (((0, 3),), ((0, 4),)))


def test_contributions_are_told_apart_by_their_coordinate_along_partial_axes() -> None:
    placements = (REPLICATE, Placement(kind="partial", op="avg"), shard(0))
    part = held(5, Shard("m", (1, 0, 1), placements, (4,)), mesh_of(2, 3, 2), (2,))
    assert (part.partial, part.partial_shape, part.ops) == ((0,), (3,), ("avg",))
    assert part.region.dims == (((2, 4),),)


@pytest.mark.parametrize(
    ("stated", "local", "words"),
    [
        (Shard("m", (2,), (shard(0),), (4,)), (2,), "no such place"),
        (Shard("m", (0, 0), (shard(0),), (4,)), (2,), "no such place"),
        (Shard("m", (0,), (shard(0),), (4,)), (3,), r"found local shape \(3,\), expected \(2,\)"),
        (Shard("m", (0,), (shard(1),), (4,)), (2,), "not there, found 1 of 1"),
        (Shard("m", (0,), (shard(0),)), (2,), "global shape is not stated"),
        (Shard("m", (0,), (shard(0),), (4,), (Box((3,), (2,)),)), (2,), r"\[3:5\], expected inside"),
        (Shard("m", (0,), (shard(0),), (4,), (Box((0,), (2,)), Box((1,), (2,)))), (4,), "overlap"),
        (Shard("m", (0,), (shard(0),), (4, 4), (Box((0, 0), (2, 2)), Box((2, 2), (2, 2)))), (4, 4), "no lo"),
        (Shard("m", (0,), (Placement(kind="flat"),), (4,)), (2,), "flat placement has no box"),
        (Shard("m", (0,), (Placement(kind="flat"),), (4,), (Box((0,), (2,)),)), (2, 1), "one dimension"),
    ],
)  # fmt: skip
def test_an_impossible_shard_is_refused_with_the_reason(
    stated: Shard, local: tuple[int, ...], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        region(stated, mesh_of(2), local)


def _torch_indices(
    size: int, sizes: tuple[int, ...], place: tuple[int, ...], cuts: list[TorchShard]
) -> list[int]:
    """Cut an index tensor along the mesh's axes with torch's own code for each placement."""
    index = torch.arange(size)
    for cut, count, here in zip(cuts, sizes, place, strict=True):
        if not isinstance(cut, Replicate):
            index = cut._split_tensor(index, count, with_padding=False, contiguous=True)[0][here]
    return index.tolist()


@pytest.mark.skipif(not hasattr(placement_types, "_StridedShard"), reason="this torch has no strided shards")
def test_placements_cut_exactly_as_torch_does() -> None:
    ours = [REPLICATE, shard(0), strided(0, 2), strided(0, 3)]
    strided_shard = placement_types._StridedShard
    theirs = [Replicate(), TorchShard(0), strided_shard(0, split_factor=2), strided_shard(0, split_factor=3)]
    cases = 0
    for size, sizes in product((1, 2, 5, 7, 12, 13), ((2, 2), (3, 2), (2, 4))):
        for chosen in product(range(len(ours)), repeat=2):
            for place in product(*map(range, sizes)):
                want = _torch_indices(size, sizes, place, [theirs[c] for c in chosen])
                got = found((size,), sizes, place, *(ours[c] for c in chosen), local=(len(want),))
                assert [i for start, stop in got.dims[0] for i in range(start, stop)] == want
                cases += 1
    assert cases == 6 * 16 * (4 + 6 + 8)


def test_offsets_are_those_of_torchs_own_function() -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    compute = getattr(utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        pytest.skip("this torch has no such function")
    for place in product(range(2), range(3)):
        placements = [TorchShard(1), TorchShard(0)]
        local, offset = compute((7, 5), (2, 3), list(place), placements)
        got = found((7, 5), (2, 3), place, shard(1), shard(0), local=tuple(local))
        assert got.shape == tuple(local)
        assert tuple(i[0][0] for i in got.dims) == tuple(offset)
