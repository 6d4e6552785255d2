"""Whoever writes a local tensor learns from a layout which elements of which whole tensor it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.geometry import Region
from tensortrace.tracer.rules import LayoutFileError, Portion, RunLayout, portions

SHARED = np.concatenate([np.arange(4), [8, 9]]), np.concatenate([np.arange(4, 8), [8, 9]])


def layout_of(text: str, axes: str = "tp = 2") -> RunLayout:
    return RunLayout.parse(f"format = 1\n[axes]\n{axes}\n[[rule]]\n{text}".encode(), Path("layout.toml"))


def global_indices(found: Region) -> np.ndarray:
    """Return the flat global index of each element of a region, in order."""
    dims = [np.concatenate([np.arange(a, b) for a, b in dim] or [np.zeros(0, int)]) for dim in found.dims]
    return np.arange(np.prod(found.global_shape)).reshape(found.global_shape)[np.ix_(*dims)].reshape(-1)


def filled(found: tuple[Portion, ...], shape: tuple[int, ...]) -> tuple[list[str], np.ndarray]:
    """Write every element's own global index (100 more for each further tensor) into a local tensor of -1."""
    local = np.full(int(np.prod(shape)), -1)
    for number, portion in enumerate(found):
        positions = portion.positions()
        where = np.arange(len(local)) if positions is None else positions
        assert (local[where] == -1).all(), "no element is written twice"
        local[where] = global_indices(portion.region) + 100 * number
    return [portion.name for portion in found], local.reshape(shape)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("text", "shape", "wanted"),
    [
        ('name = "w"\ndims = "o[tp] i"', (2, 3), [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]),
        ('name = "w"\ndims = "o i[tp]"', (2, 1), [[[0], [2]], [[1], [3]]]),
        ('name = "w"\ndims = "i[tp] o"\nto = { w = "o i" }', (1, 3), [[[0, 2, 4]], [[1, 3, 5]]]),
        ('name = "w"\ndims = "(g|u)[tp]"\nsizes = { g = 4, u = 4 }', (4,), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ('name = "w"\ndims = "(u|g)[tp]"\nsizes = { g = 4, u = 4 }\nto = { w = "(g|u)" }', (4,),
         [[4, 5, 0, 1], [6, 7, 2, 3]]),
        ('name = "w"\ndims = "(q[tp]|k)"\nsizes = { k = 2 }', (6,), SHARED),
        ('name = "w"\ndims = "s[tp:zigzag]"', (4,), [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ('name = "w"\ndims = "v[tp]"\nsizes = { v = 6 }\nvalid = { v = 4 }', (3,), [[0, 1, 2], [3, -1, -1]]),
        ('name = "w"\ndims = "v same:tp"', (2,), [[0, 1], [0, 1]]),
    ],
)  # fmt: skip
def test_a_rank_is_told_the_global_index_of_each_of_its_elements(
    text: str, shape: tuple[int, ...], wanted: list[object], rank: int
) -> None:
    names, local = filled(portions(layout_of(text), "w", rank, shape), shape)
    assert names == ["w"]
    assert local.tolist() == np.asarray(wanted[rank]).tolist()


def test_a_fused_tensor_has_a_portion_for_each_of_the_other_programs_tensors() -> None:
    text = 'name = "{l}.qkv"\ndims = "(g[tp] (q|k))"\nsizes = { g = 4, q = 2, k = 1 }\n'
    layout = layout_of(text + 'to = { "{l}.q" = "(g q)", "{l}.k" = "(g k)" }')
    names, local = filled(portions(layout, "7.qkv", 1, (6,)), (6,))
    assert names == ["7.q", "7.k"]
    assert local.tolist() == [4, 5, 102, 6, 7, 103]


def test_a_sum_over_ranks_is_told_as_such() -> None:
    [portion] = portions(layout_of('name = "w"\ndims = "o partial:tp"'), "w", 0, (3,))
    assert portion.summed


def test_what_no_rule_is_of_has_no_portion_and_a_wrong_shape_is_an_error() -> None:
    layout = layout_of('name = "w"\ndims = "o[tp] i"')
    assert portions(layout, "other", 0, (3,)) == ()
    with pytest.raises(LayoutFileError, match=r"layout.toml: rule 1 \(w\): dims 'o\[tp\] i'.*rank 0"):
        portions(layout, "w", 0, (3,))
    with pytest.raises(LayoutFileError, match=r"2 ranks.*rank 2 too"):
        portions(layout, "w", 2, (3, 3))
