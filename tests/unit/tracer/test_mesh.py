"""Grids of ranks have names of their own, and two of them make one."""

from __future__ import annotations

import pytest

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.types import Mesh

CUBE = Mesh(axes=("dp", "cp", "tp"), shape=(2, 2, 2), ranks=tuple(range(8)))
TURNED = Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 3, 2, 1))


@pytest.mark.parametrize(
    ("mesh", "world_size", "name"),
    [
        (meshes.line("tp", (0, 1)), 2, "tp"),
        (meshes.line("tp", (0, 1)), 4, "tp.0_1"),
        (meshes.line("tp", (1, 0)), 2, "tp.1_0"),
        (CUBE, 8, "dp2_cp2_tp2"),
        (TURNED, 4, "dp2_tp2.0_3_2_1"),
    ],
)
def test_a_mesh_is_named_after_its_axes_and_its_ranks(mesh: Mesh, world_size: int, name: str) -> None:
    assert meshes.name(mesh, world_size) == name


def test_many_ranks_are_told_apart_without_being_listed() -> None:
    names = {meshes.name(meshes.line("tp", range(first, first + 64)), 1024) for first in range(0, 1024, 64)}
    assert len(names) == 16
    assert max(map(len, names)) < 32


def test_the_grid_of_two_axes_is_read_from_a_mesh_that_has_both() -> None:
    left, right = meshes.line("dp", (1, 5)), meshes.line("tp", (4, 5))
    found = meshes.product(left, right, rank=5, within=[CUBE])
    assert found == Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 4, 5))
    assert meshes.coordinate(found, 5) == (1, 1)


def test_ranks_that_are_not_counted_row_by_row_keep_their_places() -> None:
    found = meshes.product(meshes.line("dp", (0, 2)), meshes.line("tp", (0, 3)), rank=0, within=[TURNED])
    assert found == TURNED


def test_axes_that_were_flattened_into_one_stay_one() -> None:
    left, right = meshes.line("dp_cp", (1, 3, 5, 7)), meshes.line("tp", (2, 3))
    found = meshes.product(left, right, rank=3, within=[CUBE])
    assert found == Mesh(axes=("dp_cp", "tp"), shape=(4, 2), ranks=tuple(range(8)))


def test_without_a_mesh_that_has_both_ranks_lie_at_equal_distances() -> None:
    found = meshes.product(meshes.line("dp", (1, 3)), meshes.line("tp", (2, 3)), rank=3, within=[])
    assert found == Mesh(axes=("dp", "tp"), shape=(2, 2), ranks=(0, 1, 2, 3))


def test_two_lines_over_the_same_ranks_make_no_grid() -> None:
    line = meshes.line("dp", (0, 1))
    assert meshes.product(line, meshes.line("tp", (0, 1)), rank=0, within=[]) is None
