"""A finished comparison whose traces are still open: for who wants to see more than its result."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Judgement, Result

NEAREST = 6
"""Comparisons that are kept of those that agree: each holds its step's boundaries, not their values."""


class Near(NamedTuple):
    """A comparison that was judged, and agrees."""

    ratio: float
    number: int
    node: Node
    entry: Comparison
    pair: StepPair
    judgement: Judgement


@dataclass
class Nearest:
    """Keeps the comparisons that agree and came nearest to what is allowed."""

    _heap: list[Near] = field(default_factory=list)
    _count: int = 0

    def keep(self, node: Node, entry: Comparison, pair: StepPair, judgement: Judgement) -> None:
        """Keep a comparison that agrees if it is nearer than those kept so far."""
        self._count += 1
        if not 0 < judgement.ratio <= 1:
            return
        found = Near(judgement.ratio, -self._count, node, entry, pair, judgement)
        if len(self._heap) < NEAREST:
            heapq.heappush(self._heap, found)
        elif found[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, found)

    def found(self) -> list[Near]:
        """Return them, the nearest first."""
        return sorted(self._heap, key=lambda near: near[:2], reverse=True)


@dataclass(frozen=True)
class Examined:
    """The result, how it came about, and both traces; ``steps`` are in a's numbers, b's are ``offset`` less.

    Valid only while ``engine.compare`` runs: it closes the traces.
    """

    result: Result
    execution: Execution
    a: Catalog
    b: Catalog
    steps: tuple[int, ...]
    offset: int
    nearest: Nearest
