"""Grids of ranks: how they are made and where a rank stands in one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import xxhash

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


LISTED_RANKS = 8
"""A mesh of more ranks than these has a hash of them in its name."""


def name(mesh: Mesh, world_size: int) -> str:
    """Return a name that tells this mesh from any other of the run, the same on all of its ranks.

    Axes, with their sizes where there are several, and ranks unless these are the whole world in order.
    """
    if len(mesh.axes) == 1:
        axes = mesh.axes[0]
    else:
        axes = "_".join(f"{axis}{size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
    if mesh.ranks == tuple(range(world_size)):
        return axes
    if len(mesh.ranks) <= LISTED_RANKS:
        return f"{axes}.{'_'.join(map(str, mesh.ranks))}"
    return f"{axes}.{xxhash.xxh3_64_hexdigest(repr(mesh.ranks).encode())}"


def product(left: Mesh, right: Mesh, rank: int, within: Iterable[Mesh]) -> Mesh | None:
    """Return the grid whose first axes are ``left`` and whose others are ``right``, both through ``rank``.

    Which ranks lie off both is read from a mesh that contains the two; without one, ranks are taken to
    lie at equal distances, as in every mesh that counts them row by row. None where no grid fits.
    """
    for mesh in within:
        axes = range(len(mesh.axes))
        subsets = [s for n in range(1, len(mesh.axes)) for s in itertools.combinations(axes, n)]
        for a, b in itertools.permutations(subsets, 2):
            if not set(a) & set(b) and _through(mesh, rank, a) == left.ranks:
                if _through(mesh, rank, b) == right.ranks:
                    return _joined(left, right, _through(mesh, rank, (*a, *b)))
    return _joined(left, right, tuple(i + j - rank for i in left.ranks for j in right.ranks))


def _joined(left: Mesh, right: Mesh, ranks: tuple[int, ...]) -> Mesh | None:
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        return None
    return Mesh(axes=(*left.axes, *right.axes), shape=(*left.shape, *right.shape), ranks=ranks)


def _through(mesh: Mesh, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of the sub-grid along these axes (in this order) that contains ``rank``."""
    here = coordinate(mesh, rank)
    if here is None:
        return ()
    found = []
    for point in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        at = list(here)
        for axis, value in zip(axes, point, strict=True):
            at[axis] = value
        index = 0
        for value, length in zip(at, mesh.shape, strict=True):
            index = index * length + value
        found.append(mesh.ranks[index])
    return tuple(found)
