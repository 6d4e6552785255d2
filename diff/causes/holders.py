"""What each rank holds of a logical tensor, as it recorded it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.logical import Together


def held_by_rank(item: Item) -> dict[int, np.ndarray]:
    """Return each rank's own part, copy or contribution."""
    if not isinstance(item.source, Together):
        return {item.source.rank: item.read()}
    return {m.rank: m.source.read(m.entry) for m in item.source.members}


def added_by_rank(items: Iterable[Item]) -> dict[int, np.ndarray]:
    """Return the sum of what each rank holds of several tensors, in float64."""
    total: dict[int, np.ndarray] = {}
    for item in items:
        for rank, value in held_by_rank(item).items():
            own = value.astype(np.float64)
            total[rank] = total[rank] + own if rank in total else own
    return total


def local_of_copies(gradients: Gradients, name: str, copies: Sequence[Item]) -> dict[int, np.ndarray]:
    """Return by rank what backward gave the holder of each copy: its own part of a sum, where it has one.

    Ranks that share rows, as those of context parallelism, may each hold a part of their cell's gradient.
    """
    own, of_cell = added_by_rank(gradients.local_items(name)), gradients.local(name)
    alone = all(len(copy.ranks) == 1 for copy in copies)
    if alone and all(_shape(own.get(c.source.rank)) == c.entry.local_shape for c in copies):
        return {copy.source.rank: own[copy.source.rank] for copy in copies}
    found = ((copy.source.rank, of_cell.get(copy.cell)) for copy in copies)
    return {rank: value.astype(np.float64) for rank, value in found if value is not None}


def _shape(value: np.ndarray | None) -> tuple[int, ...] | None:
    return None if value is None else value.shape
