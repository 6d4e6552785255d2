"""What Muon makes of round-off: it orthogonalises its momentum in bfloat16, whatever dtype the model has.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": five Newton-Schulz iterations
in bfloat16. Momenta that differ by the round-off of float32 are other numbers there now and then.
"""

from __future__ import annotations

import math

from tensortrace.diff.catalog import Slot
from tensortrace.diff.compare import EPS
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.updates import hyperparameters
from tensortrace.tracer.types import Kind

ROUNDINGS = 4.0
"""Units of bfloat16 by which two such updates differ: fifteen products of matrices, each rounded twice."""


def noise_of_muon(slot: Slot, pair: StepPair) -> float:
    """Return the relative error that an update by Muon may leave in a parameter; 0 of other optimizers.

    The update is an orthogonal matrix [m, n], of norm √min(m, n), times the rate and √max(1, m/n) or, to
    resemble Adam's, 0.2 √max(m, n).
    """
    items = pair.a.items.get(slot, ())
    if slot.kind != Kind.PARAM or not items:
        return 0.0
    hypers, optimizer = hyperparameters(slot.name, pair.a)
    entry = replica(items).entry
    norm = entry.stats.l2 if entry.stats else None
    if optimizer != "Muon" or len(entry.local_shape) != 2 or not norm:
        return 0.0
    rows, columns = entry.local_shape
    size = hypers.get("lr", 0.0) * max(math.sqrt(max(rows, columns)), 0.2 * math.sqrt(rows * columns))
    return ROUNDINGS * EPS["bfloat16"] * size / norm
