"""The gradient at a number that a module made of all of its rows: a sum's is the same in all parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.plan.comparison import StepPair
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

_NEAR = 1e-2
"""Relative difference up to which two numbers are taken for the same sum over the same rows."""


def of_a_sum(
    slot: Slot,
    a: Sequence[Item],
    b: Sequence[Item],
    pair: StepPair,
    scale_b: Callable[[Row], float] | None,
) -> Assembled | None:
    """Return each part's gradient at a sum over its rows against the reference's; None where it is no sum.

    A mean's gradients over the parts add up to that of the whole; each of a sum's is that of the whole. Which
    one it is, the values say: those of the parts of both runs have one sum, however many they are.
    """
    alike = len({item.part for item in a}) == len({item.part for item in b})
    if alike or any(item.entry.local_shape for item in (*a, *b)):
        return None
    totals = [_total(slot, view) for view in (pair.a, pair.b)]
    if not all(totals) or abs(totals[0] - totals[1]) > _NEAR * max(map(abs, totals)):
        return None
    scales = {y.part: scale_b(y) for _, y in pair.pairing.pairs} if scale_b else {}
    left = [float(item.read()) for item in a]
    right = [float(item.read()) / scales.get(item.part, 1.0) if item.part else np.nan for item in b]
    if len(set(left)) != 1:
        return None
    return Assembled(np.full(len(right), left[0]), np.asarray(right))


def _total(slot: Slot, view: StepView) -> float:
    values = view.items.get(slot._replace(kind=Kind.ACTIVATION), ())
    if not all(item.entry.local_shape == () and item.source.stored(item.entry) for item in values):
        return 0.0
    return float(sum(float(item.read()) for item in values))
