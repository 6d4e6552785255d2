"""Which ranks hold the error of a divergent boundary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.logical import Merged
from tensortrace.diff.outcome import Outcome


def ranks_at_fault(outcome: Outcome, items: Sequence[Item]) -> tuple[int, ...]:
    """Return the ranks that hold the error, the worst element's first.

    Of the ranks that share a tensor these are the ones whose part has the worst element, or all where it is
    a sum. ``items`` are those of the run at fault.
    """
    loaded, metrics = outcome.assembled, outcome.metrics
    index = metrics.max_abs_at if metrics else ()
    cells: Sequence[int] = sorted({item.cell for item in items})
    if isinstance(loaded, Assembled) and loaded.owners:
        cells, index = _cells_at_fault(loaded) or cells, index[1:]
    holders = (
        rank for cell in cells for item in items if item.cell == cell for rank in _holders(item, index)
    )
    return tuple(dict.fromkeys(holders))


def _cells_at_fault(loaded: Assembled) -> list[int]:
    error: dict[int, float] = defaultdict(float)
    start = 0
    for row, length in zip(loaded.owners, loaded.lengths, strict=True):
        piece = slice(start, start + length)
        with np.errstate(invalid="ignore"):
            delta = np.abs(loaded.b[piece].astype(np.float64) - loaded.a[piece])
        worst = float(np.nan_to_num(delta, nan=np.inf).max(initial=0.0))
        error[row.part.rank] = max(error[row.part.rank], worst)
        start += length
    worst = max(error.values(), default=0.0)
    held = [cell for cell, value in error.items() if value > 1e-2 * worst or value == worst > 0]
    return sorted(held, key=lambda cell: (-error[cell], cell))


def _holders(item: Item, index: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks whose part holds an element; ``index`` is of the tensor's last dimensions."""
    if not isinstance(item.source, Merged):
        return item.ranks
    last = len(index)
    found = tuple(
        part.rank
        for part in item.source.parts
        if not part.region.flat
        and all(
            any(start <= at < stop for start, stop in intervals)
            for at, intervals in zip(index, part.region.dims[len(part.region.dims) - last :], strict=True)
        )
    )
    return found or item.ranks
