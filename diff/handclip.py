"""Whether a run that calls no function that clips has clipped by hand, and as much as the other run did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Item, StepView
from tensortrace.diff.gradients import CLIP, Gradients
from tensortrace.diff.logical import Member, Together
from tensortrace.diff.stream import one
from tensortrace.tracer.types import Kind

AGREES = 1e-2
"""Relative difference up to which consumed gradients are taken as clipped alike; judged exactly later."""

_NEXT_TO_ONE = 1e-5
"""What a coefficient may lack to 1 that is taken for round-off: some code divides by norm + 1e-6."""

MOST_ELEMENTS = 1 << 26
"""So many elements of gradients are read to find a factor that all of them have."""


def read_gradients(view: StepView, other: StepView) -> Gradients:
    """Return the gradient rungs of a run, with what it clips by hand where the other is seen to clip."""
    mine, clipping = Gradients(view), Gradients(other)
    factor = clipped_by_hand(clipping, mine)
    if factor is None and scales_by_hand(clipping, mine):
        return Gradients(view, 1.0, from_rung=True)
    return Gradients(view, factor)


def scales_by_hand(clipping: Gradients, other: Gradients) -> bool:
    """Tell whether one run shrinks by code of its own what the other is seen to clip, but not to the same.

    Before that most of their gradients are the same; behind it each rank's part of each one is a multiple.
    """
    names = [n for n in clipping.names if clipping.before_clip(n) and other.consumed(n)]
    if not names or any(other.before_clip(name) for name in names):
        return False
    shrunk, alike = False, 0
    for name in _smallest(names, other):
        rung, before = other.last_rung_copies(name), clipping.before_clip(name)
        if not rung or before is None:
            return False
        alike += 1 if agree(before, rung[0]) else -1
        for held, consumed in _by_rank(rung, other.consumed_copies(name)):
            square = float(np.vdot(held, held))
            factor = float(np.vdot(held, consumed)) / square if square else 1.0
            left = float(np.linalg.norm(consumed - factor * held))
            if not (0 < factor < 1 + AGREES and left <= AGREES * factor * math.sqrt(square)):
                return False
            shrunk = shrunk or factor < 1 - AGREES
    return shrunk and alike > 0


def _smallest(names: Sequence[str], gradients: Gradients) -> Iterator[str]:
    """Yield parameters from the smallest on, at least one and no more than can be read whole."""
    sizes = {n: sum(math.prod(i.entry.local_shape) for i in gradients.consumed_copies(n)) for n in names}
    total = 0
    for number, name in enumerate(sorted(names, key=sizes.__getitem__)):
        total += sizes[name]
        if number and total > MOST_ELEMENTS:
            return
        yield name


def _by_rank(before: Sequence[Item], after: Sequence[Item]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what each rank holds of a gradient at two rungs."""
    held = {m.rank: m for item in before for m in _members(item)}
    for m in (m for item in after for m in _members(item)):
        mine = held.get(m.rank)
        if mine is not None and mine.shape == m.shape:
            yield mine.read(), m.read()


class _Held(NamedTuple):
    """What one rank holds of an item, unread."""

    rank: int
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def _members(item: Item) -> Iterator[_Held]:
    if not isinstance(item.source, Together):
        yield _Held(item.source.rank, item.entry.local_shape, lambda: _flat(item.read()))
        return
    for m in item.source.members:
        yield _Held(m.rank, m.entry.local_shape, partial(_read_member, m))


def _read_member(member: Member) -> np.ndarray:
    return _flat(member.source.read(member.entry))


def _flat(value: np.ndarray) -> np.ndarray:
    return np.ravel(value).astype(np.float64)


def clipped_by_hand(clipping: Gradients, other: Gradients) -> float | None:
    """Return the factor that clipping applied in one run and code of its own in the other; None if not so.

    Both must have handed the same gradients to their optimizers, though only one was seen to clip them. Those
    that differ before it are judged there: they may be nothing but round-off (of a bias of attention keys).
    """
    names = [n for n in clipping.names if clipping.before_clip(n) and clipping.consumed(n)]
    if not names or any(other.before_clip(name) for name in names):
        return None
    pairs = [(clipping.consumed(name), other.consumed(name)) for name in names]
    if any(x is None or y is None for x, y in pairs):
        return None
    apart = [n for n, (x, y) in zip(names, pairs, strict=True) if x and y and not agree(x, y)]
    if 2 * len(apart) >= len(names) or not all(_differed(name, clipping, other) for name in apart):
        return None
    factor = _coefficient(clipping)
    untouched = (_is_untouched(other, name) for name in names)
    return None if factor < 1 - _NEXT_TO_ONE and all(untouched) else factor


def _differed(name: str, clipping: Gradients, other: Gradients) -> bool:
    """Tell whether a gradient was another already before it was clipped."""
    before, mine = clipping.before_clip(name), other.last_rung_copies(name) or other.local_items(name)[-1:]
    return before is not None and bool(mine) and not agree(before, mine[0])


def _is_untouched(gradients: Gradients, name: str) -> bool:
    """Tell whether an optimizer consumes a gradient bit by bit as it was."""
    consumed, before = gradients.consumed(name), gradients.last_rung_copies(name)
    before = before or tuple(gradients.local_items(name)[-1:])
    return consumed is not None and bool(before) and before[0].entry.digest == consumed.entry.digest


def _coefficient(clipping: Gradients) -> float:
    """Return the product of the coefficients after the window's last microbatch began."""
    last, product = clipping.view.last_microbatch(), 1.0
    for slot, items in clipping.view.find(Kind.CLIPPED_GRAD):
        if (slot.name, slot.slot) == (CLIP, "coefficient") and (items[0].entry.microbatch or 0) >= last:
            product *= float(items[0].read())
    return product if math.isfinite(product) and product > 0 else 1.0


def agree(x: Item, y: Item) -> bool:
    """Tell whether two gradients are the same but for round-off, by their sketches where that is all."""
    if x.entry.local_shape != y.entry.local_shape:
        return False
    error = size = 0.0
    for left, right in _blocks(x, y):
        apart = right.astype(np.float64) - left
        error += float(np.vdot(apart, apart))
        size += float(np.vdot(left, left.astype(np.float64)))
    return error <= AGREES**2 * size


def _blocks(x: Item, y: Item) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Return both tensors in blocks; as wholes where one was not stored, whose sketch is small."""
    if any(item.entry.sketch is not None for item in (x, y)):
        return [(x.read(), y.read())]
    return zip(one(x).blocks(), one(y).blocks(), strict=True)
