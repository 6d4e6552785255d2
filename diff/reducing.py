"""What a run's reduction does to gradients, by the factors measured in the run itself."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from tensortrace.diff.factors import EXPLAINED, Factors
from tensortrace.diff.scale import CLOSE, WEIGHT_TOLERANCE


def is_plain(factors: Factors | None) -> bool:
    """Tell whether the gradient before clipping is the sum or the mean of the ranks' gradients."""
    if factors is None or factors.residual >= EXPLAINED:
        return False
    known = list(factors.by_rank.values())
    return any(np.allclose(known, wanted, rtol=CLOSE, atol=0) for wanted in (1.0, 1 / len(known)))


def is_same(now: Factors | None, then: Factors | None) -> bool:
    """Tell whether ranks' gradients are reduced in one step as in another."""
    if now is None or then is None or max(now.residual, then.residual) >= EXPLAINED:
        return False
    tolerance = max(WEIGHT_TOLERANCE, now.uncertainty, then.uncertainty)
    return now.by_rank.keys() == then.by_rank.keys() and all(
        math.isclose(factor, then.by_rank[rank], rel_tol=tolerance) for rank, factor in now.by_rank.items()
    )


def is_ratio(factor: float, counts: Iterable[float]) -> bool:
    """Tell whether a factor is a quotient of products of two of the counts that steps divide by."""
    numbers = {1.0, *(float(count) for count in counts if count)}
    products = {x * y for x in numbers for y in numbers}
    return any(math.isclose(factor, x / y, rel_tol=WEIGHT_TOLERANCE) for x in products for y in products)
