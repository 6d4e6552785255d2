"""Which ranks work on the same samples: the data cells of a run.

Tensor, sequence, context and pipeline parallel ranks hold parts of one batch; data parallel ranks hold
batches of their own. Which is which comes from the shards that wrappers or layouts declared, never from
equal inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tensortrace.tracer.types import Kind, Mesh, Shard

SAMPLE_KINDS = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOSS})
"""Kinds whose rows are samples: what one cell holds of them is its own batch."""

PIPELINE = "pp"
"""The mesh that joins the stages of a pipeline, which work on the same microbatches."""


@dataclass(frozen=True)
class Cells:
    """The cell of each rank, named after its lowest rank; a rank that no mesh joins is a cell of its own.

    ``joined`` holds (mesh, axis) along which ranks work on the same samples; every other axis carries data.
    """

    of: dict[int, int]
    joined: frozenset[tuple[Mesh, int]]

    def cell(self, rank: int) -> int:
        """Return the lowest rank of the cell that a rank is in."""
        return self.of.get(rank, rank)

    def carries_data(self, mesh: Mesh, axis: int) -> bool:
        """Tell whether ranks along a mesh's axis hold different samples."""
        return (mesh, axis) not in self.joined


def find_cells(
    ranks: Iterable[int],
    labelled: Iterable[tuple[Mesh, Shard]],
    meshes: Iterable[Mesh],
    declared: tuple[Mesh, tuple[str, ...]] | None = None,
    *,
    spread: Iterable[tuple[Mesh, Shard]] = (),
) -> Cells:
    """Join ranks along every axis on which a sample-kind tensor is anything but different data.

    ``labelled`` are the meshes and shards of sample-kind entries, ``meshes`` all that were declared.
    ``declared`` is a layout file's mesh, with the axes that it says carry data: all others join.
    ``spread`` are parameters whose module's calls nothing is seen of (a compiled graph): an axis on which
    they are spread and no wrapper's data is joins as well.
    """
    labelled = list(labelled)
    joined: dict[tuple[Mesh, int], None] = {}
    if declared:
        mesh, data = declared
        joined = {(mesh, axis): None for axis, name in enumerate(mesh.axes) if name not in data}
    for mesh, shard in labelled:
        for axis, placement in enumerate(shard.placements):
            if placement.kind != "data":
                joined[(mesh, axis)] = None
    of_data = {
        line
        for mesh, shard in labelled
        for axis, placement in enumerate(shard.placements)
        if placement.kind == "data"
        for line in lines(mesh, axis)
    }
    for mesh, shard in spread:
        for axis, placement in enumerate(shard.placements):
            if placement.dim is not None and not of_data & set(lines(mesh, axis)):
                joined[(mesh, axis)] = None
    for mesh in meshes:
        joined |= {(mesh, axis): None for axis, name in enumerate(mesh.axes) if name == PIPELINE}
    of = {rank: rank for rank in ranks}
    for mesh, axis in joined:
        for line in lines(mesh, axis):
            present = [rank for rank in line if rank in of]
            lowest = min((of[rank] for rank in present), default=0)
            merged = {of[rank] for rank in present}
            of = {rank: lowest if cell in merged else cell for rank, cell in of.items()}
    return Cells(of, frozenset(joined))


def lines(mesh: Mesh, axis: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups of ranks that differ only in their coordinate along one axis."""
    inner = 1
    for size in mesh.shape[axis + 1 :]:
        inner *= size
    size = mesh.shape[axis]
    for start in range(0, len(mesh.ranks), inner * size):
        for offset in range(inner):
            yield mesh.ranks[start + offset : start + inner * size : inner]
