"""The factor between two runs' gradients where no token's weight was recorded: no loss was seen.

It is read where the gradients come from, at what the model returned. A mistake in backward spoils what comes
behind that, and the parameters' gradients most of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable, by_rows
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.factors import EXPLAINED, projected
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import ROOT, Kind

_NEAR = 1e-2
"""Relative difference up to which two numbers are taken for the same sum, or mean, of the same rows."""


def gradient_scale(pair: StepPair) -> Callable[[Row], float]:
    """Return the factor by which each row's gradients of ``b`` are divided."""
    if pair.scale.observed or (pair.same_scheme and not pair.whole_on_ranks):
        return pair.scale.of
    fitted = fitted_scale(pair)

    def scale(row: Row) -> float:
        if fitted is None:
            raise NotComparable("scale not observed: neither token weights nor local gradients tell it")
        return fitted

    return scale


def fitted_scale(pair: StepPair) -> float | None:
    """Return one factor between the runs' gradients, where token weights were not observed."""
    outputs = [slot for slot in pair.a.items if slot.kind == Kind.ACTIVATION_GRAD and slot.name == ROOT]
    for slot in outputs:
        if slot.phase == "train" and slot.slot.startswith("out"):
            found = _at_output(slot, pair)
            if found is not None:
                return found
    ratios = []
    for name in pair.gradients_a.names:
        a, b = (g.window_sum(name) for g in (pair.gradients_a, pair.gradients_b))
        factor = projected(a, b) if a and b else None
        if factor is not None:
            ratios.append(factor)
    return float(np.median(ratios)) if ratios and np.median(ratios) else None


def _at_output(slot: Slot, pair: StepPair) -> float | None:
    """Return the factor between the gradients at one output of the model; None where it is not one factor."""
    a, b = (view.items.get(slot, ()) for view in (pair.a, pair.b))
    if not a or not b or not all(item.source.stored(item.entry) for item in (*a, *b)):
        return None
    if not any(item.entry.local_shape for item in (*a, *b)):
        return _at_number(slot, a, b, pair)
    try:
        loaded = by_rows(a, b, pair.pairing, additive=True)
    except NotComparable:
        return None
    left, right = loaded.a.astype(np.float64).ravel(), loaded.b.astype(np.float64).ravel()
    square = float(np.vdot(left, left))
    factor = float(np.vdot(left, right)) / square if square and np.isfinite(square) else 0.0
    apart = float(np.linalg.norm(right - factor * left))
    return factor if factor and apart <= EXPLAINED * abs(factor) * square**0.5 else None


def _at_number(slot: Slot, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> float | None:
    left, right = _by_part(a), _by_part(b)
    if len(set(left.values())) != 1 or len(set(right.values())) != 1:
        return None
    one, other = next(iter(left.values())), next(iter(right.values()))
    if not one or not other:
        return None
    return other / one if _is_sum(slot, pair) else other * len(right) / (one * len(left))


def of_a_sum(
    slot: Slot,
    a: Sequence[Item],
    b: Sequence[Item],
    pair: StepPair,
    scale_b: Callable[[Row], float] | None,
) -> Assembled | None:
    """Return each part's gradient at a sum over its rows against the reference's; None where it is no sum.

    A mean's gradients over the parts add up to that of the whole; each of a sum's is that of the whole.
    """
    if any(item.entry.local_shape for item in (*a, *b)) or not _is_sum(slot, pair):
        return None
    scales = {y.part: scale_b(y) for _, y in pair.pairing.pairs} if scale_b else {}
    left, right = _by_part(a), _by_part(b)
    if len(left) == len(right) or len(set(left.values())) != 1:
        return None
    found = [value / scales.get(part, 1.0) for part, value in right.items()]
    return Assembled(np.full(len(found), next(iter(left.values()))), np.asarray(found))


def _is_sum(slot: Slot, pair: StepPair) -> bool:
    """Tell whether a number is a sum over rows: its values in all parts of either run have one sum."""
    totals = [_total(slot, view) for view in (pair.a, pair.b)]
    return all(totals) and abs(totals[0] - totals[1]) <= _NEAR * max(map(abs, totals))


def _total(slot: Slot, view: StepView) -> float:
    values = view.items.get(slot._replace(kind=Kind.ACTIVATION), ())
    if not all(item.entry.local_shape == () and item.source.stored(item.entry) for item in values):
        return 0.0
    return sum(_by_part(values).values())


def _by_part(items: Sequence[Item]) -> dict[Part, float]:
    return {item.part: float(item.read()) for item in items if item.part is not None}
