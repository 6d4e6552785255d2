"""Sketches of row-aligned boundaries: where both runs saw the same samples those of all parts add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensortrace.diff.catalog import Item, Part, StepView
from tensortrace.diff.estimate import NEEDS_VALUES, Estimate
from tensortrace.diff.logical import NOT_STORED, Unkept
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row
from tensortrace.diff.sketched import of_region, sketched
from tensortrace.diff.stream import Sketched
from tensortrace.tracer.codec_dtypes import dtype_of
from tensortrace.tracer.geometry import full_region
from tensortrace.tracer.identities import Identities
from tensortrace.tracer.sketch import SIZE
from tensortrace.tracer.types import Entry, Kind

_CLOSE = 1e-6
"""Relative difference up to which the tokens of a part have one weight: that of float32 products."""

OTHER_SAMPLES = f"{NOT_STORED}, and its sketches are of other samples, or of the same ones padded otherwise"
OTHER_ORDER = f"{NOT_STORED}, its sketches tell no samples apart, and the runs split the batch differently"
UNEVEN = f"{NOT_STORED}, and its rows are to be scaled one by one"


def of_rows(
    a: Sequence[Item],
    b: Sequence[Item],
    views: tuple[StepView, StepView],
    pairing: Pairing,
    *,
    scale_b: Callable[[Row], float] | None = None,
    additive: bool = False,
) -> Sketched:
    """Return both sides of a boundary of which some parts were not stored, as estimates.

    Raises Unkept where their samples are not the same, or their rows are scaled differently within a part.
    """
    sides = [_Side(items, view) for items, view in ((a, views[0]), (b, views[1]))]
    scales = _scales(pairing, scale_b) if scale_b else {}
    apart = any(side.by_samples for side in sides)
    if apart:
        if sides[0].samples != sides[1].samples:
            raise Unkept(OTHER_SAMPLES)
        if any(entry.sketch.rows is None for side in sides for entry in side.sketches if entry.sketch):
            raise Unkept(OTHER_ORDER)  # of a rank that had no input, as a later stage of a pipeline
        return Sketched.of(sides[0].summed({}, apart), sides[1].summed(scales, apart))
    if not any(side.alike for side in sides) and not _is_alike(a, b, views, pairing):
        raise Unkept(OTHER_ORDER)  # rows that went elsewhere (to experts) have an order of their own
    if additive:
        x, y = sides[0].summed({}, apart), sides[1].summed(scales, apart)
        if x.shape != y.shape:
            raise Unkept(OTHER_SAMPLES)
        return Sketched.of(x, y)
    if all(side.alike or len(side.items) == 1 for side in sides) and not scales:
        return Sketched.of(sides[0].first, sides[1].first)
    if all(len(items) == 1 for items in (a, b)) and sides[0].order == sides[1].order:
        return Sketched.of(sides[0].summed({}, apart), sides[1].summed(scales, apart))
    raise Unkept(OTHER_ORDER)


@dataclass(frozen=True)
class _Side:
    """The parts of a boundary in one run."""

    items: Sequence[Item]
    view: StepView

    @cached_property
    def by_samples(self) -> bool:
        """Whether the indices of some sketch are identities of samples."""
        return any(entry.sketch is not None and entry.sketch.rows is not None for entry in self.sketches)

    @cached_property
    def sketches(self) -> list[Entry]:
        """The entries of members that have a sketch."""
        return [entry for item in self.items for _, entry in item.members if entry.sketch is not None]

    @cached_property
    def samples(self) -> Counter[int]:
        """How often each sample is in the parts."""
        return Counter(int(found) for item in self.items for found in self._identities(item))

    @cached_property
    def order(self) -> list[int]:
        """The samples as they lie in the parts."""
        return [int(found) for item in self.items for found in self._identities(item)]

    @property
    def alike(self) -> bool:
        """Whether several parts hold the same: then it follows no rows."""
        return len(self.items) > 1 and len({item.entry.digest for item in self.items}) == 1

    @property
    def first(self) -> Estimate:
        """The first part."""
        return self._estimate(self.items[0])

    def summed(self, scales: dict[Part, float], apart: bool) -> Estimate:
        """Return the sum over the parts, each divided by its scale; ``apart`` if of samples of their own."""
        found = [self._estimate(item) / scales.get(_part(item), 1.0) for item in self.items]
        shapes = {x.shape[1:] for x in found}
        sizes = {x.numbers.shape for x in found}
        if len(shapes) != 1 or len(sizes) != 1 or not found[0].shape:
            raise Unkept(OTHER_SAMPLES)
        first = sum(x.shape[0] for x in found) if apart else found[0].shape[0]
        norms = [x.norm for x in found if x.norm is not None]
        known = len(norms) == len(found) and (apart or len(found) == 1)
        return Estimate(
            np.sum([x.numbers for x in found], axis=0),
            (first, *shapes.pop()),
            math.hypot(*norms) if known else None,
        )

    def _identities(self, item: Item) -> np.ndarray:
        samples = _passes(self.view, item).samples(item.entry)
        if samples is None:
            raise Unkept(OTHER_ORDER)
        return samples.identities

    def _estimate(self, item: Item) -> Estimate:
        known = sketched(item.source, item.entry)
        if known is not None:
            return known
        value = item.read()
        if value.dtype.kind != "f":
            raise Unkept(NEEDS_VALUES)
        follows = _passes(self.view, item).follows(item.entry, item.entry.local_shape)
        numbers = of_region(value, full_region(value.shape), SIZE, follows)
        norm = float(np.linalg.norm(np.ravel(value).astype(np.float64)))
        return Estimate(numbers, value.shape, norm if math.isfinite(norm) else None)


def _is_alike(
    a: Sequence[Item], b: Sequence[Item], views: tuple[StepView, StepView], pairing: Pairing
) -> bool:
    """Tell whether indices mean the same in both runs: on the same ranks, or where they are positions."""
    held, world = ({i.ranks for i in a}, {i.ranks for i in b}), [{r for r, _ in v.by_event} for v in views]
    if held[0] == held[1] and world[0] == world[1] and pairing.extents_a == pairing.extents_b:
        return True
    sides = ((a, pairing.extents_a), (b, pairing.extents_b))
    found = [(i.entry.local_shape, known.get(_part(i))) for side, known in sides for i in side]
    return all(shape and extent and shape[0] == extent.positions for shape, extent in found)


def _part(item: Item) -> Part:
    assert item.part is not None  # it belongs to a pass
    return item.part


def _passes(view: StepView, item: Item) -> Identities:
    """Return what the recorder of a tensor's pass knew of its samples, from the inputs."""
    found = Identities()
    given = [i for _, items in view.find(Kind.INPUT) for i in items if i.part == item.part]
    for other in sorted(given, key=lambda i: i.entry.event):
        value = np.ascontiguousarray(other.read())
        if value.dtype != dtype_of(other.entry.dtype).storage:
            raise Unkept(OTHER_ORDER)  # a format that numpy lacks: what was hashed are its own bytes
        found.see(other.entry, value.reshape(-1).view(np.uint8), whole=True)
    return found


def _scales(pairing: Pairing, scale_b: Callable[[Row], float]) -> dict[Part, float]:
    """Return the factor of each part of ``b``; raise Unkept where its rows have several."""
    found: dict[Part, float] = {}
    for _, row in pairing.pairs:
        scale = scale_b(row)
        if not math.isclose(found.setdefault(row.part, scale), scale, rel_tol=_CLOSE):
            raise Unkept(UNEVEN)
    return found
