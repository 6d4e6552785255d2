"""How many times the noise of identical code another run of it may show, by the number of runs measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensortrace.diff.result import Judgement

RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Numbers of floor runs that the table has a row for; others take the row below."""

NUMBERS = (1, 2, 4, 8)
"""Independent numbers in a boundary's noise; no tensor is credited with more than 8, however large it is."""

FACTORS = (
    (math.inf, 1000.0, 42.0, 8.7),
    (800.0, 38.0, 8.5, 4.0),
    (94.0, 14.0, 5.2, 3.1),
    (34.0, 8.2, 4.0, 2.7),
    (13.0, 5.1, 3.2, 2.3),
    (7.8, 4.1, 2.8, 2.2),
    (5.1, 3.3, 2.4, 2.0),
    (4.1, 2.9, 2.3, 1.9),
    (3.3, 2.5, 2.1, 1.8),
)
"""The factor f with P(d > f · max(d₁ … dₙ)) = 1e-6, where all dᵢ² are χ² of so many degrees of freedom.

All runs of identical code are equally far from ``a`` in distribution, so the (n+1)-th is farther than the n
before with probability 1/(n+1); how much farther is what the table says (``benchmarks/floor_table.py``).
"""

THIN = 10.0
"""A floor that must be multiplied by more says too little: the error model decides alone."""


@dataclass(frozen=True)
class Floor:
    """What identical code differs by at one boundary: the worst of some runs, for each test.

    ``rel`` is the L2 error, ``peak`` the worst element, ``coherent`` the common factor.
    """

    runs: int
    rel: float
    peak: float
    coherent: float

    def factor(self, elements: int) -> float:
        """Return how many times the floor is still noise in a tensor of so many elements."""
        row = max(i for i, runs in enumerate(RUNS) if runs <= self.runs)
        column = max(i for i, numbers in enumerate(NUMBERS) if numbers <= max(elements, 1))
        return FACTORS[row][column]

    def limits(self, elements: int) -> tuple[float, float, float] | None:
        """Return what the three tests allow by the floor; None where it is zero or too thin to tell."""
        factor = self.factor(elements)
        if not self.rel or factor > THIN:
            return None
        return self.rel * factor, self.peak * factor, self.coherent * factor

    def said(self, error: float, elements: int) -> str:
        """Return what the floor says of an error, in words."""
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        if not self.rel:
            return f"bitwise stable in {runs} of identical code: the error model decides"
        times = f"{error / self.rel:.3g} times the floor of {runs}"
        factor = self.factor(elements)
        if factor > THIN:
            return f"{times}, too thin for so few elements ({elements}): the error model decides"
        return f"{times}, {factor:g} is still noise"


def floor_of(errors: Sequence[tuple[float, float, float]]) -> Floor | None:
    """Return the floor of some runs' (L2 error, worst element, common factor); None of no run."""
    if not errors:
        return None
    rel, peak, coherent = (max(column) for column in zip(*errors, strict=True))
    return Floor(len(errors), rel, peak, coherent)


def floor_notes(judgements: Iterable[Judgement]) -> list[str]:
    """Return how many boundaries the floor decided, and why it did not decide the others."""
    counts = Counter(_said(j) for j in judgements if j.floor_runs and j.policy != "exact")
    if not counts:
        return []
    told = ", ".join(f"{counts[text]:,} {text}" for text in _SAID if counts[text])
    return [f"floor: of {counts.total():,} boundaries compared with it, {told}"]


_SAID = (
    "are judged by it",
    "differ between runs of identical code by less than the error model allows, which decides",
    "are bitwise stable, so the error model decides",
    "have too few elements for so few runs, so the error model decides",
)


def _said(judgement: Judgement) -> str:
    if judgement.policy == "floor":
        return _SAID[0]
    return _SAID[2 if "bitwise stable" in judgement.reason else 3 if "too thin" in judgement.reason else 1]
