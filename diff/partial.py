"""How large the partial sums of a parameter's gradient become before they cancel.

The error model takes the terms of a sum to be of random signs. Of a batch that holds rows of one sign before
those of the other (chosen answers before rejected ones, real images before generated ones) the partial sums
grow far beyond that, whatever is left of them in the end, and round off as what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from tensortrace.diff.catalog import Item, StepView
from tensortrace.diff.logical import Unkept
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.stream import LARGE_ELEMENTS
from tensortrace.tracer.types import Kind


def growth(entry: Comparison, shape: tuple[int, ...], pair: StepPair) -> float:
    """Return how many times larger than those of random signs the partial sums of a gradient are.

    It is told from the gradients that flow into the parameter's users, row by row in the order of the
    batch, as the root mean square over the rows, which is 1/√2 of the terms' norm for random signs. At
    least 1, the worse of the two runs; 1 where the gradients were not recorded, or are added up by index.
    """
    return max(1.0, *(_of_run(list(_users(entry, view)), shape) for view in (pair.a, pair.b)))


def _users(entry: Comparison, view: StepView) -> Iterator[Item]:
    slots = dict.fromkeys(slot for _, slot in entry.magnitude_of if slot.kind == Kind.ACTIVATION_GRAD)
    for slot in slots:
        yield from view.items.get(slot, ())


def _of_run(items: Iterable[Item], shape: tuple[int, ...]) -> float:
    """Return the same of one run, whose parts are each added up by themselves."""
    partial = total = rows = 0.0
    with suppress(Unkept):
        for item in items:
            if math.prod(item.entry.local_shape) > LARGE_ELEMENTS:
                return 1.0
            terms = _terms(item.read(), shape)
            if terms is None or not np.isfinite(terms).all():
                return 1.0
            total += float(np.vdot(terms, terms))
            rows += len(terms)
            sums = np.cumsum(terms, axis=0)
            partial += float(np.vdot(sums, sums))
    return math.sqrt(2 * partial / (rows * total)) if total else 1.0


def _terms(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the rows that are added up, as float64; None where elements of the parameter are no columns."""
    if gradient.ndim > 1 and shape and gradient.dtype.kind == "f":
        for axis in (gradient.ndim - 1, 1):
            if gradient.shape[axis] == shape[0]:
                return np.moveaxis(gradient, axis, -1).reshape(-1, shape[0]).astype(np.float64)
    return None
