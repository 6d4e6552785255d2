"""One boundary of module calls: what their formulas give in all parts of the batch, beside what is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.masters import spacing
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.result import Judgement
from tensortrace.diff.tolerance import ACCUMULATOR, Measured, judge_model, measure_peak
from tensortrace.replay.computed import computed
from tensortrace.replay.contract import Ref

LEAST_NORMAL: dict[str, float] = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}
"""Below it the numbers of a format have one spacing: nothing smaller is as exact as larger ones."""

GREATEST: dict[str, float] = {
    "float16": 65504.0, "bfloat16": 2.0**128 * (1 - 2.0**-8), "float32": 2.0**128 * (1 - 2.0**-24),
}  # fmt: skip


@dataclass
class Held:
    """An array that is kept as long as it is needed next, and computed again after that."""

    make: Callable[[], np.ndarray]
    value: np.ndarray | None = None

    def get(self) -> np.ndarray:
        """Return the array."""
        return self.make() if self.value is None else self.value


@dataclass(frozen=True)
class Part:
    """What one part of the batch should hold of a boundary, and what it does.

    ``eps`` is the spacing at which it was computed, ``stores`` how often the kernel rounds to the format of
    the result what it computes in float32; 0 where that is not known.
    """

    slot: Slot
    microbatch: int | None
    actual: Item
    held: Held
    terms: float
    length: int
    eps: float
    stores: int = 0

    @property
    def expected(self) -> Item:
        """What should be there, as an item."""
        return computed(self.actual, lambda: [self.held.get()])

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what should be there, rounded where it exceeds the format, and what is."""
        dtype = self.actual.entry.dtype
        made, there = self.held.get(), np.asarray(self.actual.read())
        made = made.reshape(there.shape)
        most = GREATEST.get(dtype)
        if most is not None:
            beyond = np.abs(made) > most
            if beyond.any():
                made = np.where(beyond, np.copysign(np.inf, made), made)
        return made, there if not self.stores else without_rounding(made, there, dtype, self.stores)

    @property
    def floor(self) -> float:
        """The norm of the smallest normal numbers."""
        size = math.prod(self.actual.entry.local_shape)
        return LEAST_NORMAL.get(self.actual.entry.dtype, 0.0) * math.sqrt(size)

    @property
    def spacing(self) -> float:
        """The spacing at which what is compared was computed: float32's, where roundings are set aside."""
        return ACCUMULATOR if self.stores else self.eps


def without_rounding(made: np.ndarray, there: np.ndarray, dtype: str, stores: int) -> np.ndarray:
    """Return what is there but for what so many roundings to the nearest may have changed.

    The last one is by half a spacing at what is stored, those before it by half an epsilon of its size.
    """
    there = there.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.fmax(np.abs(made), np.abs(there))
        least = LEAST_NORMAL.get(dtype, 0.0)
        slack = 0.5 * spacing(np.fmax(size, least), dtype) + (stores - 1) * 0.5 * EPS[dtype] * size
        apart = there - made
        left = np.sign(apart) * np.fmax(np.abs(apart) - slack, 0.0)
        return np.where(np.isfinite(apart), made + left, there)


def judged(part: Part) -> Judgement:
    """Judge one part by itself."""
    made, there = part.sides()
    terms = max(part.terms, part.floor)
    metrics = measure_blocks(made.shape, [(made, there)], eps=part.spacing)
    peak = measure_peak([(made, there)], metrics, terms)
    return judge_model(Measured(metrics, peak, terms, part.length), part.spacing, ())


def comparison(parts: Sequence[Part], parents: tuple[Ref, ...], text: str) -> Comparison:
    """Return the parts of one boundary as the diff compares two sides: what is expected is ``a``."""
    first = parts[0]

    def load() -> Assembled:
        sides = [part.sides() for part in parts]
        if len(sides) == 1:
            return Assembled(*sides[0])
        if len({made.shape[1:] for made, _ in sides}) == 1 and all(made.ndim for made, _ in sides):
            a, b = (np.concatenate(side) for side in zip(*sides, strict=True))
        else:
            a, b = (np.concatenate([np.ravel(x) for x in side]) for side in zip(*sides, strict=True))
        return Assembled(a, b)

    return Comparison(
        first.slot, first.microbatch, load, tuple(p.expected for p in parts), tuple(p.actual for p in parts),
        parents, eps=max(p.spacing for p in parts), summed=max(p.length for p in parts),
        terms=math.sqrt(sum(max(p.terms, p.floor) ** 2 for p in parts)), text=text,
    )  # fmt: skip
