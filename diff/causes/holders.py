"""What each rank holds of a logical tensor, as it recorded it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tensortrace.diff.catalog import Item
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
