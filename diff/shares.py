"""What each rank's tokens weigh in the gradient that the optimizer is given, after every reduction."""

from __future__ import annotations

from msgspec import Struct

from tensortrace.diff.factors import Factors
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.scale import TokenWeights


class Share(Struct, frozen=True, kw_only=True):
    """One microbatch of one rank (the lowest of those that share its samples).

    ``weight`` is what the backward pass gives one token, ``factor`` what the reduction multiplies this rank's
    gradient by; None where it was not observed or differs between tokens. ``effective`` is their product.
    """

    rank: int
    microbatch: int
    tokens: int | None
    weight: float | None
    factor: float | None

    @property
    def effective(self) -> float | None:
        """What a token weighs in the reduced gradient."""
        return None if self.weight is None or self.factor is None else self.weight * self.factor


def shares(pair: StepPair) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """Return the shares of both runs in one step."""
    skipped = pair.overflowed  # factors of infinities tell nothing
    factors = (None, None) if skipped else (pair.gradients_a.factors, pair.gradients_b.factors)
    return _shares(pair.weights_a, factors[0]), _shares(pair.weights_b, factors[1])


def _shares(weights: TokenWeights, factors: Factors | None) -> tuple[Share, ...]:
    return tuple(
        Share(
            rank=part.rank, microbatch=part.number, tokens=weights.count.get(part), weight=weight,
            factor=factors.by_rank.get(part.rank) if factors else None,
        )
        for part, weight in sorted(weights.weight.items())
    )  # fmt: skip
