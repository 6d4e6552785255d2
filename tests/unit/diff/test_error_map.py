"""Where in a tensor two runs differ: blocks, histograms and ranks' parts, against numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.catalog import Part as Pass
from tensortrace.diff.compare import EPS
from tensortrace.diff.error_map import COLUMNS, ROWS, SIZES, ErrorMap, Part, error_map
from tensortrace.diff.logical import Merged
from tensortrace.diff.rows import Row
from tensortrace.diff.stream import Streamed, Whole
from tensortrace.tracer.geometry import Held, Region

F32 = EPS["float32"]


def mapped(a: np.ndarray, b: np.ndarray, items_b: tuple[Any, ...] = (), **fields: Any) -> ErrorMap:
    found = error_map(Assembled(a, b, **fields), (), items_b, F32)
    assert found is not None
    return found


def held(*regions: Region, **fields: Any) -> tuple[Item, ...]:
    """Return an item that ranks 0, 1, … hold together, one region each."""
    parts = tuple(Held(rank, region, region.shape, **fields) for rank, region in enumerate(regions))
    nothing: Any = None
    return (Item(Merged((), parts), nothing, None, 0, 0),)


def test_one_wrong_element_is_one_block_in_units_of_the_root_mean_square() -> None:
    a = np.full((4, 6), 2.0, np.float32)
    b = a.copy()
    b[1, 4] = 2.5
    found = mapped(a, b)
    assert found.grid == (4, 6)
    assert found.blocks == tuple(0.25 if n == 1 * 6 + 4 else 0.0 for n in range(24))
    assert found.zero == 23
    assert {SIZES[n]: count for n, count in enumerate(found.sizes) if count} == {-1: 1}  # 0.1 ≤ 0.25 < 1


def test_blocks_of_a_large_tensor_are_root_mean_squares_of_their_elements() -> None:
    a = np.ones((2 * ROWS, 2 * COLUMNS))
    b = a.copy()
    b[0, 0] += 3e-3
    b[1, 1] -= 4e-3
    b[-1, -1] += 1e-3
    found = mapped(a, b)
    assert found.grid == (ROWS, COLUMNS)
    assert math.isclose(found.blocks[0], math.sqrt((9e-6 + 16e-6) / 4), rel_tol=1e-9)
    assert math.isclose(found.blocks[-1], math.sqrt(1e-6 / 4), rel_tol=1e-9)
    assert sum(level > 0 for level in found.blocks) == 2


def test_differences_are_counted_in_units_of_the_last_place() -> None:
    a = np.ones(6, np.float32)
    b = a + np.array([0, 1, 3, 4, 1024, 2**25], np.float32) * np.float32(2**-23)
    found = mapped(a, b)
    assert found.zero == 1
    counted = {n: count for n, count in enumerate(found.ulps) if count}
    assert counted == {1: 1, 2: 1, 3: 1, 11: 1, 25: 1}  # 1, 2-3, 4-7, 1024-2047, 2^24 and beyond


def test_what_only_one_run_has_no_number_of_is_told_apart() -> None:
    a = np.array([1.0, np.nan, np.inf, 1.0])
    b = np.array([1.0, np.nan, np.inf, np.nan])
    found = mapped(a, b)
    assert (found.broken, found.zero) == (1, 3)
    assert found.blocks == (0.0, 0.0, 0.0, math.inf)


def test_a_tensor_of_several_dimensions_is_seen_as_square_as_it_can_be() -> None:
    a = np.ones((64, 32, 3, 3))
    found = mapped(a, a + 1e-3)
    assert (found.rows, found.columns, found.split) == (64, 288, 1)
    found = mapped(np.ones((3, 50, 60)), np.zeros((3, 50, 60)))
    assert (found.rows, found.columns, found.split) == (150, 60, 2)


def test_a_single_number_has_no_map() -> None:
    assert error_map(Assembled(np.array(1.0), np.array(2.0)), (), (), F32) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 130), st.integers(2, 150), st.integers(0, 2**32 - 1))
def test_squares_of_blocks_add_up_to_the_whole_difference(rows: int, columns: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    a = draw.normal(size=(rows, columns))
    b = a + draw.normal(size=a.shape) * 1e-3
    found = mapped(a, b)
    owners = np.zeros(found.grid)
    for r in range(rows):
        for c in range(columns):
            owners[r * found.grid[0] // rows, c * found.grid[1] // columns] += 1
    total = float(np.sum(np.square(found.blocks) * owners.ravel()))
    assert math.isclose(total, np.sum((b - a) ** 2) / np.mean(a**2), rel_tol=1e-9)
    assert sum(found.sizes) == sum(found.ulps) == a.size


def test_a_streamed_tensor_has_the_map_of_the_whole_one() -> None:
    draw = np.random.default_rng(5)
    a = draw.normal(size=(1100, 2000)).astype(np.float32)
    b = a + draw.normal(size=a.shape).astype(np.float32) * np.float32(1e-4)
    streamed = error_map(Streamed(Whole(a), Whole(b)), (), (), F32)
    whole = mapped(a, b)
    assert streamed is not None
    assert (streamed.sizes, streamed.ulps, streamed.zero) == (whole.sizes, whole.ulps, whole.zero)
    assert np.allclose(streamed.blocks, whole.blocks, rtol=1e-12)


A = np.ones((4, 6))
NEXT = np.zeros((4, 6))


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        (
            Region((4, 6), (((0, 4),), ((0, 3),))), Region((4, 6), (((0, 4),), ((3, 6),))),
            [Part("rank 0", (0, 4), (0, 3)), Part("rank 1", (0, 4), (3, 6))],
        ),
        (
            Region((4, 6), (((0, 1),), ((0, 6),))), Region((4, 6), (((1, 4),), ((0, 6),))),
            [Part("rank 0", (0, 1), (0, 6)), Part("rank 1", (1, 4), (0, 6))],
        ),
        (
            Region((4, 6), (((0, 12),),), flat=True), Region((4, 6), (((12, 24),),), flat=True),
            [Part("rank 0", (0, 2), (0, 6)), Part("rank 1", (2, 4), (0, 6))],
        ),
        (  # interleaved: no boxes
            Region((4, 6), (((0, 1), (2, 3)), ((0, 6),))), Region((4, 6), (((1, 2), (3, 4)), ((0, 6),))), [],
        ),
    ],
)  # fmt: skip
def test_borders_lie_where_ranks_parts_do(first: Region, second: Region, parts: list[Part]) -> None:
    found = mapped(A, NEXT, held(first, second))
    assert list(found.parts) == parts
    assert found.side == ("b" if parts else "")


def test_ranks_of_one_part_share_its_label_and_summands_have_no_borders() -> None:
    whole = Region((4, 6), (((0, 4),), ((0, 6),)))
    left, right = Region((4, 6), (((0, 4),), ((0, 3),))), Region((4, 6), (((0, 4),), ((3, 6),)))
    labels = [part.label for part in mapped(A, NEXT, held(left, left, right)).parts]
    assert labels == ["ranks 0, 1", "rank 2"]
    assert mapped(A, NEXT, held(whole, whole, partial=(0,), partial_shape=(2,), ops=("sum",))).parts == ()


def test_parts_of_a_dimension_in_the_middle_are_ranges_of_the_matrix() -> None:
    a = np.ones((2, 8, 3))  # seen as 16 x 3
    parts = held(
        Region(a.shape, (((0, 1),), ((0, 8),), ((0, 3),))), Region(a.shape, (((1, 2),), ((0, 8),), ((0, 3),)))
    )
    assert [part.rows for part in mapped(a, a + 1, parts).parts] == [(0, 8), (8, 16)]
    across = held(
        Region(a.shape, (((0, 2),), ((0, 4),), ((0, 3),))), Region(a.shape, (((0, 2),), ((4, 8),), ((0, 3),)))
    )
    assert mapped(a, a + 1, across).parts == ()  # each rank has two ranges of rows


def rows(*ranks: int) -> tuple[Row, ...]:
    return tuple(Row(Pass(rank, "train", 0), n, 0, 2, b"") for n, rank in enumerate(ranks))


def test_rows_of_a_batch_lie_between_borders_of_the_ranks_that_had_them() -> None:
    a = np.ones((6, 4))
    found = mapped(a, a + 1, owners=rows(0, 0, 1), lengths=(2, 1, 3))
    assert list(found.parts) == [Part("rank 0", (0, 3), (0, 4)), Part("rank 1", (3, 6), (0, 4))]
    numbers = mapped(np.ones(3), np.zeros(3), owners=rows(0, 1, 1), lengths=(1, 1, 1))
    assert list(numbers.parts) == [Part("rank 0", (0, 1), (0, 1)), Part("rank 1", (0, 1), (1, 3))]


def test_columns_that_ranks_share_are_found_behind_rows_that_were_put_together() -> None:
    a = np.ones((5, 4))  # from activations of [2, 3, 4] with one position of padding
    left = Region((2, 3, 4), (((0, 2),), ((0, 3),), ((0, 2),)))
    right = Region((2, 3, 4), (((0, 2),), ((0, 3),), ((2, 4),)))
    found = mapped(a, a + 1, held(left, right), owners=rows(0, 0), lengths=(3, 2))
    assert list(found.parts) == [Part("rank 0", (0, 5), (0, 2)), Part("rank 1", (0, 5), (2, 4))]
