"""What is found while the steps of a run are replayed one after another."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensortrace.diff.catalog import Catalog, StepView
from tensortrace.diff.execute import Execution
from tensortrace.replay.contract import Gap
from tensortrace.tracer.reader import Trace


class OracleCatalog(Catalog):
    """The boundaries of a run as they would be if every contract were kept, as far as its steps were held."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.expected: dict[int, StepView] = {}

    def view(self, step: int) -> StepView:
        """Return a step as it should be; as it was recorded, where nothing is known of it."""
        return self.expected[step] if step in self.expected else super().view(step)


@dataclass
class Replaying:
    """What is found while steps are replayed one after another."""

    catalog: Catalog
    oracle: OracleCatalog
    execution: Execution = field(default_factory=Execution)
    gaps: list[tuple[int, Gap]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    recomputed: int = 0
    unplaced: frozenset[str] = frozenset()
    lost: list[str] = field(default_factory=list)
