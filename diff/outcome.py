"""What the comparison of one boundary ended as, where there is something to tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.causality import Node
from tensortrace.diff.expect.rules import Rule
from tensortrace.diff.plan.comparison import Comparison, OneSided
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Judgement, Metrics


@dataclass(frozen=True)
class Outcome:
    """One executed comparison.

    ``assembled`` is kept only of origins; of a tensor too large to hold it is the block numbered ``window``,
    which has the worst element. ``shape`` is that of the whole. ``rule`` is what the user declared of it;
    ``bounded`` tells whether the error of a receiver was judged: an update's by its formula, another's by
    what its inputs' errors may be amplified to, unless those are too large for a bound. ``ranks`` are of b;
    ``disagrees`` is the run whose replicas are unequal where the other's are not. ``against`` says what a
    gradient was held against, where that is not the other run's.
    """

    node: Node
    comparison: Comparison | OneSided
    role: str | None
    metrics: Metrics | None
    judgement: Judgement | None
    text: str
    assembled: Assembled | None = None
    pair: StepPair | None = None
    ranks: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    window: int | None = None
    rule: Rule | None = None
    bounded: bool = False
    disagrees: Literal["a", "b"] | None = None
    against: str = ""

    @property
    def expected(self) -> bool:
        """Whether the difference was declared, as far as is known before causes are sought."""
        return self.role == "declared" or (self.rule is not None and self.rule.cause is not None)
