"""Tests of the masks of parts: each is the part of the whole tensor's mask."""

from __future__ import annotations

import pytest
import torch

from tensortrace.tracer.start.masks import Begin, kept, shape_of
from tensortrace.tracer.start.rows import Piece, Rows, identify, joined, pieces

ROWS = Rows(torch.tensor([11, -7, 5]), 6)


def mask(
    shape: tuple[int, ...],
    *,
    rows: Rows = ROWS,
    starts: tuple[Begin, ...] = (),
    merged: bool = False,
    key: int = 99,
) -> torch.Tensor:
    found = shape_of(shape, rows, starts=starts, merged=merged)
    assert found is not None
    return kept(key, 0.5, rows, found, torch.device("cpu"))


def test_a_part_of_the_features_or_positions_has_that_part_of_the_mask() -> None:
    whole = mask((3, 6, 10))
    assert torch.equal(mask((3, 6, 4), starts=(0, 0, 6)), whole[:, :, 6:])
    assert torch.equal(mask((3, 2, 10), starts=(0, 4, 0)), whole[:, 4:])
    assert torch.equal(mask((3, 2, 4), starts=(0, 4, 6)), whole[:, 4:, 6:])


def test_heads_of_a_rank_have_their_own_masks() -> None:
    whole = mask((3, 4, 6, 6))
    assert torch.equal(mask((3, 2, 6, 6), starts=(0, 2, 0, 0)), whole[:, 2:])
    assert torch.equal(mask((12, 6, 6), merged=True), whole.flatten(0, 1))
    assert not torch.equal(whole[:, :2], whole[:, 2:])


def test_positions_first_is_the_same_mask_turned() -> None:
    assert torch.equal(mask((6, 3, 10)), mask((3, 6, 10)).transpose(0, 1))


@pytest.mark.parametrize("shape", [(), (5,), (4, 7)])
def test_a_tensor_without_the_rows_has_none(shape: tuple[int, ...]) -> None:
    assert shape_of(shape, ROWS) is None


def test_half_of_the_elements_stay_in_every_direction() -> None:
    rows = Rows(torch.arange(64), 64)
    found = mask((64, 32, 33), rows=rows).double()
    for dim in range(3):
        means = found.mean([d for d in range(3) if d != dim])
        assert (means - 0.5).abs().max() < 5 * 0.5 / (found.numel() / found.shape[dim]) ** 0.5
        pairs = (found.narrow(dim, 1, found.shape[dim] - 1) - 0.5) * (
            found.narrow(dim, 0, found.shape[dim] - 1) - 0.5
        )
        assert abs(pairs.mean()) < 5 * 0.25 / pairs.numel() ** 0.5, "neighbours are independent"


def test_a_mask_that_is_given_says_which_positions_count() -> None:
    short = torch.tensor([[4, 5, 6]])
    long = torch.tensor([[4, 5, 6, 0, 0]])
    valid = torch.tensor([[1, 1, 1, 0, 0]])
    one = identify([("in.0", short)])
    two = identify([("in.0", long), ("in.kw.attention_mask", valid)])
    marked = identify([("in.0", long), ("in.kw.src_key_padding_mask", valid == 0)])
    other = identify([("in.0", long)])
    assert marked is not None
    assert torch.equal(marked.numbers, two.numbers) if two is not None else False
    assert one is not None
    assert two is not None
    assert other is not None
    assert torch.equal(one.numbers, two.numbers)
    assert not torch.equal(one.numbers, other.numbers)
    assert torch.equal(identify([("in.0", long)], 0).numbers, one.numbers)  # type: ignore[union-attr]


def test_rows_of_numbers_are_told_by_their_bits() -> None:
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [0.0, 1.0]])
    found = identify([("in.0", x)])
    assert found is not None
    first, second, third = found.numbers.tolist()
    assert first == third != second
    assert identify([("in.0", torch.tensor(1.0))]) is None


RUNS = {
    "contiguous": [[(0, 4)], [(4, 8)]],
    "zigzag": [[(0, 2), (6, 8)], [(2, 6)]],
    "three": [[(0, 3)], [(3, 6)], [(6, 8)]],
}
TOKENS = torch.tensor(
    [[5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, 0, 9, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 7]]
)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_ranks_that_hold_parts_of_the_positions_name_rows_as_one_rank_does(
    runs: list[list[tuple[int, int]]], padding: int | None
) -> None:
    whole = identify([("in.0", TOKENS)], padding)
    assert whole is not None
    told = []
    for own in runs:
        part = torch.cat([TOKENS[:, a:b] for a, b in own], 1)
        told += [piece.written() for piece in pieces([("in.0", part)], own, padding)]
    assert torch.equal(joined([Piece.read(p) for p in told], 4).numbers, whole.numbers)


def test_a_mask_of_the_positions_leaves_out_the_same_on_parts() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0]] * 4)
    whole = identify([("in.0", TOKENS), ("in.kw.attention_mask", mask)], 0)
    assert whole is not None
    told: list[Piece] = []
    for a, b in ((0, 5), (5, 8)):
        told += pieces([("in.0", TOKENS[:, a:b]), ("in.kw.attention_mask", mask[:, a:b])], [(a, b)], 0)
    assert torch.equal(joined(told, 5).numbers, whole.numbers)


def test_positions_in_several_runs_have_their_parts_of_the_mask() -> None:
    whole = mask((3, 8, 10))
    part = mask((3, 4, 10), starts=(0, ((0, 2), (6, 8)), 0))
    assert torch.equal(part, torch.cat([whole[:, :2], whole[:, 6:]], 1))
