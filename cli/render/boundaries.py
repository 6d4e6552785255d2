"""Every boundary that was judged, with what would have been flagged there, as a table."""

from __future__ import annotations

from tensortrace.cli.render import words
from tensortrace.cli.render.numbers import number
from tensortrace.cli.render.page import Page
from tensortrace.diff.result import Judged, Result

_HEADS = ["step", "mb", "×allowed", "coherent", "incoherent", "judged by", "boundary"]


def boundaries(page: Page, result: Result) -> None:
    """Write the boundaries judged by a tolerance: error over allowance, and the power of each."""
    found = [b for b in result.boundaries if b.judgement.policy != "exact"]
    if not found:
        return
    page.blank()
    page.line(
        ("judged by a tolerance:", "bold"), " the smallest relative errors that would have been flagged"
    )
    page.table(_HEADS, [_row(each) for each in found], right="step,mb,×allowed,coherent,incoherent")


def _row(found: Judged) -> tuple[str, ...]:
    where, judgement = found.where, found.judgement
    how = "model"
    if judgement.floor_runs:
        runs = f"{judgement.floor_runs} run{'s' if judgement.floor_runs > 1 else ''}"
        how = f"floor of {runs}" if judgement.policy == "floor" else f"model, not floor of {runs}"
    if judgement.cancelled:
        how += ", terms cancel"
    return (
        str(where.step),
        "-" if where.microbatch is None else str(where.microbatch),
        number(judgement.ratio),
        "-" if judgement.power_coherent is None else number(judgement.power_coherent),
        "-" if judgement.power_incoherent is None else number(judgement.power_incoherent),
        how,
        words.key(where),
    )
