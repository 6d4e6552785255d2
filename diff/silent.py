"""Parameters without effect: what correct runs have of them differs by whole steps, and nothing comes of it.

The gradient of an attention's key bias is 0, since it shifts all scores of a query alike: what is computed of
it is round-off, of which an optimizer that normalises makes whole steps. Such elements tell themselves by
their gradients, which are nothing beside the terms that they sum, in every step. So their error is set aside:
the objective and all gradients are what they would be without it. Only what lies before the point where they
cancel shows it, as a *shift*: all of a row, or of a query's scores, differ by one number.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from tensortrace.diff.assemble import Assembled

NOTHING = 2.0**-10
"""A gradient that is no more than this of a typical one, or of its terms, is round-off."""

UNITS = 4.0
"""Units of round-off of its terms that it may be, in coarse dtypes."""

RUN = 8
"""So many neighbours, or all there are, must be silent: of a single element's gradient it may be chance."""


class Aside(NamedTuple):
    """Which elements of a parameter are silent, and what of their error may have an effect all the same."""

    elements: np.ndarray
    leak: float


def silent_elements(a: np.ndarray, b: np.ndarray, size: float, eps: float) -> Aside | None:
    """Return which elements of two gradients of a vector are silent; None where none are.

    ``size`` is the norm of the terms that they sum, at least of ``a``.
    """
    if a.ndim != 1 or not a.size or not np.isfinite(size):
        return None
    leak = max(NOTHING, UNITS * eps)
    small = np.maximum(np.abs(a), np.abs(b)) <= leak * size / np.sqrt(a.size)
    small &= np.isfinite(a) & np.isfinite(b)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], small.astype(np.int8), [0]))))
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        if stop - first < min(RUN, a.size):
            small[first:stop] = False
    return Aside(small, leak) if small.any() else None


def both_silent(before: Aside | None, now: Aside | None) -> Aside | None:
    """Return what is silent in both of two steps."""
    if before is None or now is None or before.elements.shape != now.elements.shape:
        return None
    elements = before.elements & now.elements
    return Aside(elements, max(before.leak, now.leak)) if elements.any() else None


def without_silent(loaded: Assembled, aside: Aside | None) -> Assembled | None:
    """Return both sides of a parameter with silent elements made equal; None where that changes nothing."""
    if aside is None or loaded.a.shape != aside.elements.shape:
        return None
    if not np.any(aside.elements & (loaded.a != loaded.b)):
        return None
    return loaded._replace(b=np.where(aside.elements, loaded.a, loaded.b))


def without_shift(loaded: Assembled) -> Assembled | None:
    """Return both sides without what all elements along some dimensions differ by alike.

    Equal elements, such as masked ones, differ by nothing and are left alone. Of all sets of dimensions that
    one counts without which least is left. None where there is no dimension to speak of.
    """
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differs = (loaded.a != loaded.b) & np.isfinite(a) & np.isfinite(b)
        delta = np.where(differs, b - a, 0.0)
    best, least = None, float(np.linalg.norm(delta))
    dims = [axis for axis in range(a.ndim) if a.shape[axis] > 1]
    for count in range(1, len(dims) + 1):
        for along in combinations(dims, count):
            number = np.maximum(differs.sum(axis=along, keepdims=True), 1)
            left = np.where(differs, delta - delta.sum(axis=along, keepdims=True) / number, 0.0)
            if (norm := float(np.linalg.norm(left))) < least:
                best, least = left, norm
    return None if best is None else Assembled(a, np.where(differs, a + best, loaded.b))
