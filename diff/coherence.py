"""How much of a difference may look like one common factor by chance: clusters of errors, and rounding.

The projection ⟨a,b⟩/⟨a,a⟩ of two correct runs scatters around 1. Were the errors of elements independent,
its standard error would be √(Σ x²r²)/Σ x², with r what the common factor leaves of the difference. They are
not: an error of one token reaches all features of its row, one of a parameter all rows of a column. So the
products x·r are summed within rows and within columns first, as for clustered observations (Liang & Zeger
1986; Cameron, Gelbach & Miller 2011); the greatest of the standard errors counts. A factor itself leaves no
r, and is in none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tensortrace.diff.compare import Sides, flat_chunks

MOST = 4096
"""Clusters of one kind that are kept; of more, neighbours are joined, which is a coarser cluster."""

FEW = 4
"""Fewer clusters, or distinct values, say nothing about their scatter."""

SAMPLED = 4096
"""Elements that are looked at to see how many distinct values a tensor has."""

_TINY = 1e-300


class Coherence(NamedTuple):
    """What a common factor may be without a mistake, relative.

    ``spread`` is its standard error, ``rounding`` what rounding every element in one direction makes: half a
    unit of its last place, by which a truncating kernel shrinks all elements in the mean. Where a tensor has
    few distinct values (a broadcast number), equal roundings do not average out: up to a whole unit.
    """

    spread: float = 0.0
    rounding: float = 0.0


NONE = Coherence()
"""Of tensors that are equal."""


def measure_coherence(
    shape: tuple[int, ...], blocks: Iterable[Sides], projection: float | None, eps: float
) -> Coherence | None:
    """Return what may look like a common factor; ``blocks`` are those that ``projection`` was measured on.

    None of a tensor of fewer than ``FEW`` distinct values: what one number is wrong by looks like a factor.
    """
    if projection is None:
        return Coherence()
    sums = _Sums(shape, projection - 1.0, eps)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for a, b in blocks:
            twice = 2 if a.dtype.kind == "c" else 1
            for x, y in flat_chunks(a, b):
                sums.add(x, y, twice)
    return sums.result()


def clusters(shape: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Return the clusters that a tensor's elements fall into: a name, their number and their stride.

    Element n of a row-major tensor is in cluster n // stride; 0 stands for the columns, which take turns.
    """
    size, width = math.prod(shape), shape[-1] if shape else 1
    rows = size // width if width else 0
    outer = math.prod(shape[1:]) if len(shape) > 2 else 0
    kinds = (("rows", rows, width), ("columns", width, 0), ("outer", shape[0] if outer else 0, outer))
    return [kind for kind in kinds if FEW <= kind[1] < size]


def rounding_alike(distinct: int) -> float:
    """Return how much of a rounding may be the same for all elements of a tensor of so many values.

    They differ by 0.4 units in the mean square, at most by one; of 256 it is seen in the scatter.
    """
    return min(1.0, max(0.0, 4 / math.sqrt(max(distinct, 1)) - 1 / 4))


class _Sums:
    """Sums of x·r within clusters, over the chunks of two tensors in row-major order."""

    def __init__(self, shape: tuple[int, ...], offset: float, eps: float) -> None:
        self.width = shape[-1] if shape else 1
        self.offset, self.eps, self.seen = offset, eps, 0
        self.xx = self.single = self.half = 0.0
        self.distinct = 0
        self.clusters = {
            name: (np.zeros(min(count, MOST)), -(-count // MOST), stride)
            for name, count, stride in clusters(shape)
        }

    def add(self, x: np.ndarray, y: np.ndarray, twice: int) -> None:
        """Take in the next elements; complex numbers come as ``twice`` as many."""
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            x, y = np.where(finite, x, 0.0), np.where(finite, y, 0.0)
        size = np.abs(x)
        products = x * ((y - x) - self.offset * x)
        self.xx += float(x @ x)
        self.single += float(products @ products)
        spacing = self.eps * np.exp2(np.floor(np.log2(np.maximum(size, _TINY))))
        self.half += 0.5 * float(size @ spacing)
        if not self.seen:
            self.distinct = int(np.unique(size[:: max(size.size // SAMPLED, 1)]).size)
        at = (self.seen + np.arange(x.size)) // twice
        self.seen += x.size
        for found, joined, stride in self.clusters.values():
            number = at // stride if stride else at % self.width
            number = np.minimum(number // joined, found.size - 1)
            first = int(number.min())
            sums = np.bincount(number - first, products)
            found[first : first + sums.size] += sums

    def result(self) -> Coherence | None:
        """Return the greatest standard error, and the bound of rounding; None where neither can be known."""
        if not self.xx:
            return Coherence()
        if self.distinct < FEW:
            return None
        spread = math.sqrt(self.single)
        for sums, _, _ in self.clusters.values():
            # few clusters scatter less than they would: Student's quantiles, roughly
            spread = max(spread, float(np.linalg.norm(sums)) * (1 + 8 / sums.size))
        return Coherence(spread / self.xx, self.half / self.xx * (1 + rounding_alike(self.distinct)))
