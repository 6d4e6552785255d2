"""Grids of ranks: how they are made and where a rank stands in one."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tensortrace.tracer.types import Mesh


def line(axis: str, ranks: Iterable[int]) -> Mesh:
    """Return a mesh of one axis over the global ranks, in the order given."""
    ranks = tuple(ranks)
    return Mesh(axes=(axis,), shape=(len(ranks),), ranks=ranks)


def coordinate(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """Return a global rank's coordinate, one number per axis, or None where it is not in the mesh."""
    if rank not in mesh.ranks:
        return None
    rest, found = mesh.ranks.index(rank), []
    for size in reversed(mesh.shape):
        rest, here = divmod(rest, size)
        found.append(here)
    return tuple(reversed(found))


def size(mesh: Mesh) -> int:
    """Return the number of ranks in the mesh."""
    return math.prod(mesh.shape)
