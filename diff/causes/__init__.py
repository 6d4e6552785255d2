"""Names the cause of the first origin: detectors propose, one shared function tests."""

from __future__ import annotations

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.execute import Execution, Outcome
from tensortrace.diff.result import Cause


def name_causes(origin: Outcome, execution: Execution, a: Catalog, b: Catalog) -> tuple[Cause, ...]:
    """Return the tested causes of an origin, best first."""
    return ()
