"""Gradients behind gates: where an input lies within its round-off of 0, ReLU may let pass in one run alone.

Of such an element one run's gradient is exactly 0 and the other's is whole, in programs that are both right;
of two equal maxima of a pool likewise. Coarse dtypes have many inputs so close to a gate, float32 hardly any.
"""

from __future__ import annotations

import math

import numpy as np

from tensortrace.diff.assemble import Assembled

NEAR = 4.0
"""Units of round-off around a gate within which an input may fall on either side of it."""

SIGMAS = 5.0
"""Standard deviations by which so many elements may exceed the number that is expected."""


def without_flipped(loaded: Assembled, *, eps: float) -> Assembled | None:
    """Return both gradients with equal values where one alone is exactly 0; None where those are too many.

    Inputs spread over a range near 1 lie within ``NEAR`` × ``eps`` of a gate with about that probability.
    """
    a, b = loaded.a, loaded.b
    flipped = ((a == 0) != (b == 0)) & np.isfinite(a) & np.isfinite(b)
    count, expected = int(np.count_nonzero(flipped)), NEAR * eps * a.size
    if not count or count > expected + SIGMAS * math.sqrt(expected):
        return None
    return loaded._replace(b=np.where(flipped, a, b))
