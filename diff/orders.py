"""In which order a tensor holds rows and positions: run by run, since modules take either first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.extent import Extent
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rearranged import Rearranged
from tensortrace.tracer.types import Entry

Side = dict[Part, Item]


@dataclass(frozen=True)
class Arranged(Rearranged):
    """Stands in the place of who holds a tensor, and gives its rows before its positions.

    ``turned``: positions come first in it. ``apart``: they are flattened in it, and are not in what it gives.
    """

    extent: Extent
    turned: bool
    apart: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what it gives."""
        shape, (rows, positions, *_) = self.entry.local_shape, self.extent
        if self.apart:
            return (rows, positions or 0, *shape[1:])
        return (rows, positions or 0, *shape[2:]) if self.turned and not self._is_flat else shape

    @property
    def _is_flat(self) -> bool:
        return self.entry.local_shape[:2] != (self.extent.positions, self.extent.rows)

    def read(self, entry: Entry) -> np.ndarray:
        """Return the tensor with its rows first."""
        values, (rows, positions, *_) = self.source.read(self.entry), self.extent
        if self._is_flat:
            first = (positions or 0, rows) if self.turned else (rows, positions or 0)
            values = values.reshape(*first, *values.shape[1:])
        values = np.swapaxes(values, 0, 1) if self.turned else values
        return np.ascontiguousarray(values).reshape(self.shape)


def readings(a: Side, b: Side, pairing: Pairing) -> Iterator[tuple[Side, Side, Pairing]]:
    """Yield both sides with rows first, as they may be meant; first as the batch itself is.

    Another order is a reading only where the sizes of all parts of a run allow it. Where one run flattens
    rows and positions, they are put apart.
    """
    as_given = replace(
        pairing,
        extents_a={part: e._replace(time_major=False) for part, e in pairing.extents_a.items()},
        extents_b={part: e._replace(time_major=False) for part, e in pairing.extents_b.items()},
    )
    dims = [max((len(i.entry.local_shape) for i in side.values()), default=0) for side in (a, b)]
    for of_a in _orders(a, pairing.extents_a, apart=dims[0] == dims[1] - 1):
        for of_b in _orders(b, pairing.extents_b, apart=dims[1] == dims[0] - 1):
            yield of_a, of_b, as_given


def _orders(side: Side, extents: dict[Part, Extent], *, apart: bool) -> list[Side]:
    known = {part: item for part, item in side.items() if part in extents}
    shapes = [(item.entry.local_shape, extents[part]) for part, item in known.items()]
    flat = all(_is_flat(shape, extent) for shape, extent in shapes)
    apart = apart and flat
    if not known or not (flat or all(_is_turned(shape, extent) for shape, extent in shapes)):
        return [side]

    def order(*, turned: bool) -> Side:
        if not turned and not apart:
            return side
        return side | {part: _arranged(i, extents[part], turned, apart) for part, i in known.items()}

    time_major = all(extent.time_major for _, extent in shapes)
    return [order(turned=time_major), order(turned=not time_major)]


def _is_turned(shape: tuple[int, ...], extent: Extent) -> bool:
    return not extent.packed and shape[:2] == (extent.positions, extent.rows)


def _is_flat(shape: tuple[int, ...], extent: Extent) -> bool:
    """Tell whether a tensor may hold all positions of all rows, flattened: in which order, no size tells."""
    rows, positions = extent.rows, extent.positions or 0
    if extent.packed or not shape or _is_turned(shape, extent):
        return False
    return min(rows, positions) > 1 and shape[0] == rows * positions


def _arranged(item: Item, extent: Extent, turned: bool, apart: bool) -> Item:
    source = Arranged(item.source, item.entry, extent, turned, apart)
    return item._replace(source=source, entry=with_fields(item.entry, local_shape=source.shape))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return how far two tensors are apart, relative to the first; infinite where shapes differ."""
    if a.shape != b.shape:
        return math.inf
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.nan_to_num(np.abs(b.astype(np.float64) - a)).sum())
        return apart / (float(np.nan_to_num(np.abs(a.astype(np.float64))).sum()) or 1.0)
