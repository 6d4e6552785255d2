"""Different inputs: other rows, other order, or rows that several ranks repeat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.rows import Row, duplicated_across_ranks, read_batch
from tensortrace.tracer.types import Kind


def different_rows(case: Case) -> Sequence[Proposal]:
    """Propose that the runs saw different rows: duplicates, another step's rows, or new ones."""
    if case.origin.node.slot.kind != Kind.INPUT:
        return ()
    batch_a, batch_b = case.pair.batch_a, case.pair.batch_b
    left = {row.digest for row in batch_a.rows}
    strange = [row for row in batch_b.rows if row.digest not in left]
    duplicates = duplicated_across_ranks(batch_a, batch_b)
    if duplicates:
        names = ", ".join(map(str, sorted({row.part.rank for row in duplicates})))
        text = f"ranks {names} of b were given the same rows ({len(duplicates)} of {len(batch_b.rows)})"
        return (_told("input.duplicated_across_ranks", text, len(duplicates)),)
    total = len(batch_b.rows)
    elsewhere = _steps_that_hold(case, strange)
    if elsewhere:
        text = f"{len(strange)} of {total} rows of b are a's of step {elsewhere}: the data's order differs"
        return (_told("input.order", text, len(strange)),)
    text = f"{len(strange)} of {total} rows of b are not among a's {len(batch_a.rows)} rows of this step"
    return (_told("input.different", text, len(strange)),)


def _steps_that_hold(case: Case, strange: Sequence[Row]) -> str:
    wanted = {row.digest for row in strange}
    for view_a, _ in case.views():
        if wanted and wanted <= {row.digest for row in read_batch(view_a, "train").rows}:
            return str(view_a.step)
    return ""


def _told(code: str, text: str, count: int) -> Proposal:
    """Return a proposal whose evidence is a count of rows: compared exactly, so undoing it leaves nothing."""
    number, none = np.array(float(count)), np.array(0.0)
    return Proposal(code, text, [number], [number], [none], float(count), "rows")
