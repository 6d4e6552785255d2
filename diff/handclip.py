"""Whether a run that calls no function that clips has clipped by hand as much as the other run did."""

from __future__ import annotations

import math

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.gradients import CLIP, Gradients
from tensortrace.diff.stream import one
from tensortrace.tracer.types import Kind

AGREES = 1e-2
"""Relative difference up to which consumed gradients are taken as clipped alike; judged exactly later."""


def clipped_by_hand(clipping: Gradients, other: Gradients) -> float | None:
    """Return the factor that clipping applied in one run and code of its own in the other; None if not so.

    Both must have handed the same gradients to their optimizers, although only one was seen to clip them.
    """
    names = [n for n in clipping.names if clipping.before_clip(n) and clipping.consumed(n)]
    if not names or any(other.before_clip(name) for name in names):
        return None
    pairs = [(clipping.consumed(name), other.consumed(name)) for name in names]
    if not all(x is not None and y is not None and _agree(x, y) for x, y in pairs):
        return None
    return _coefficient(clipping)


def _coefficient(clipping: Gradients) -> float:
    """Return the product of the coefficients after the window's last microbatch began."""
    last, product = clipping.view.last_microbatch(), 1.0
    for slot, items in clipping.view.find(Kind.CLIPPED_GRAD):
        if (slot.name, slot.slot) == (CLIP, "coefficient") and (items[0].entry.microbatch or 0) >= last:
            product *= float(items[0].read())
    return product if math.isfinite(product) and product > 0 else 1.0


def _agree(x: Item, y: Item) -> bool:
    if x.entry.local_shape != y.entry.local_shape:
        return False
    error = size = 0.0
    for left, right in zip(one(x).blocks(), one(y).blocks(), strict=True):
        error += float(np.sum((right.astype(np.float64) - left) ** 2))
        size += float(np.sum(left.astype(np.float64) ** 2))
    return error <= AGREES**2 * size
