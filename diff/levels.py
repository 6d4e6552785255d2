"""What can be said of a boundary whose values were not stored: digests, and what statistics refute."""

from __future__ import annotations

import math

from tensortrace.diff.catalog import Catalog, Item
from tensortrace.diff.logical import NOT_STORED
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.result import Metrics
from tensortrace.tracer.types import Kind

_FAINT = 1e-12
"""Relative error of a norm that was summed in float64."""


UNSEEN_FIRST = 1024.0
"""Units of round-off that a boundary of the first step may inherit from what was not recorded."""

UNSEEN_LATER = 0.01
"""Relative error that one of a later step may inherit: an optimizer makes whole steps of round-off."""


def most_unseen(step: int, eps: float) -> float:
    """Return the relative error that a boundary may inherit from what was not recorded."""
    return UNSEEN_FIRST * eps if step <= 0 else max(UNSEEN_LATER, UNSEEN_FIRST * eps)


RECORD_IN_FULL = "what was not compared is when both runs are recorded with --level full"


RECORD_THERE = (
    "the values there are stored when both runs are recorded again with: trace record --full-at REPORT.json, "
    "where --json REPORT.json of this diff wrote it"
)


def levels_told(a: Catalog, b: Catalog) -> str:
    """Return the levels at which two runs were recorded, in words."""
    told = []
    for side, catalog in (("a", a), ("b", b)):
        promises = [rank.manifest.promise for rank in catalog.trace.ranks if rank.manifest]
        levels = ", ".join(sorted({promise.level for promise in promises})) or "unknown"
        spared = " with --dedup-replicas" if any(promise.dedup_replicas for promise in promises) else ""
        told.append(f"{side} was recorded at level {levels}{spared}")
    return ", ".join(told)


def lacking(entry: Comparison) -> str:
    """Return why a boundary's values cannot be read, "" where they can or an estimate stands for them."""
    sides = [any(i.bare and not i.readable for i in items) for items in (entry.items_a, entry.items_b)]
    if not any(sides):
        return ""
    told = "both runs" if all(sides) else "a" if sides[0] else "b"
    return f"{NOT_STORED} in {told}: only digests and statistics were"


def same_digests(entry: Comparison, *, same_scheme: bool) -> bool:
    """Tell whether equal digests say that a boundary is equal, as those of single tensors do.

    Of gradients and losses, which are sums over parts of the batch, where both runs split it alike.
    """
    if len(entry.items_a) != len(entry.items_b) or not (same_scheme or entry.slot.kind not in _SUMMED):
        return False
    return all(_key(x) == _key(y) for x, y in zip(entry.items_a, entry.items_b, strict=True))


_SUMMED = frozenset({Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD})


def _key(item: Item) -> tuple[object, ...]:
    return item.part, item.entry.digest


def refuted(entry: Comparison) -> Metrics | None:
    """Return the least that two tensors differ by, as their exact statistics say; None where they don't.

    Numbers of elements that are not finite, and L2 norms, whose difference ‖b − a‖ is no less than.
    Statistics never tell that tensors are equal. Of single tensors of one shape only.
    """
    if len(entry.items_a) != 1 or len(entry.items_b) != 1 or entry.slot.kind in _SUMMED:
        return None
    x, y = entry.items_a[0].entry, entry.items_b[0].entry
    if x.stats is None or y.stats is None or x.local_shape != y.local_shape:
        return None
    count, norms = math.prod(x.local_shape), (x.stats.l2 or 0.0, y.stats.l2 or 0.0)
    if (x.stats.nan, x.stats.inf) != (y.stats.nan, y.stats.inf):
        return Metrics(
            elements=count, equal=False, rel_l2=math.inf, abs_l2=math.inf, norm_a=norms[0], norm_b=norms[1],
            nonfinite_a=x.stats.nan + x.stats.inf, nonfinite_b=y.stats.nan + y.stats.inf,
        )  # fmt: skip
    least = max(abs(norms[1] - norms[0]) - _FAINT * max(norms), 0.0)
    return Metrics(
        elements=count, equal=False, rel_l2=least / norms[0] if norms[0] else math.inf if least else 0.0,
        abs_l2=least, norm_a=norms[0], norm_b=norms[1],
    )  # fmt: skip
