"""Updates that some ranks make and others skip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensortrace.diff.catalog import StepView
from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.plan.samples import lags
from tensortrace.diff.rows import Row, read_batch
from tensortrace.tracer.types import Kind

CODE = "step.skipped_on_some_ranks"
_UPDATED = frozenset({Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM})


def skipped_by_scaler(case: Case) -> Sequence[Proposal]:
    """Propose that some ranks' scalers skipped the step, having found what others did not."""
    if case.origin.node.slot.kind not in _UPDATED:
        return ()
    for slot, items in case.pair.b.find(Kind.SCHEDULE):
        if slot.slot != "skipped":
            continue
        flags = {item.source.rank: bool(item.read()) for item in items}
        skipping = sorted(rank for rank, flag in flags.items() if flag)
        if 0 < len(skipping) < len(flags):
            others = [rank for rank in sorted(flags) if rank not in skipping]
            text = (
                f"the scaler of {_ranks(skipping)} of b skipped the step of {slot.name}, "
                f"that of {_ranks(others)} did not: found-inf must be reduced across ranks"
            )
            return (told(CODE, text, len(skipping), "rank(s) that skipped", simplicity=-1),)
    return ()


def skipped_by_program(case: Case) -> Sequence[Proposal]:
    """Propose that some ranks went on to the next batch without an update, so that their windows lag behind.

    Such a rank's window stays open: it holds further microbatches, of rows that ``a`` has in later steps.
    """
    if case.origin.node.slot.kind != Kind.INPUT:
        return ()
    batch = case.pair.batch_b
    microbatches: dict[int, int] = {}
    for part in batch.extents:
        microbatches[part.rank] = max(microbatches.get(part.rank, 0), part.number + 1)
    usual = min(microbatches.values(), default=0)
    odd = sorted(rank for rank, count in microbatches.items() if count > usual)
    if not odd or len(odd) == len(microbatches):
        return ()
    later = [row for row in batch.rows if row.part.number >= usual]
    here = {row.digest for row in case.pair.batch_a.rows}
    known = all(row.digest in here for row in batch.rows if row.part.number < usual)
    if not known or not _are_of_later_steps(later, case):
        return ()
    step = case.pair.b.step
    text = (
        f"{_ranks(odd)} of b made no optimizer step after microbatch {usual - 1} of step {step} "
        "and went on to the next batch: its later steps lie behind those of the other ranks"
    )
    return (told(CODE, text, len(odd), "rank(s) that skipped", simplicity=-1),)


def skipped_by_stage(case: Case) -> Sequence[Proposal]:
    """Propose that some of the ranks that work on the same rows went on without an update."""
    if case.origin.node.slot.kind != Kind.INPUT:
        return ()
    found = lags(case.pair.b)
    odd = sorted({rank for ranks in found.values() for rank in ranks})
    if not odd or lags(case.pair.a):
        return ()
    step = case.pair.b.step
    text = (
        f"{_ranks(odd)} of b made no optimizer step in step {step} and went on to the next batch: "
        "the other ranks that work on the same rows made one"
    )
    return (told(CODE, text, len(odd), "rank(s) that skipped", simplicity=-1),)


def _are_of_later_steps(rows: Sequence[Row], case: Case) -> bool:
    views: Iterable[StepView] = (a for a, _ in case.views() if a.step > case.pair.a.step)
    wanted = {row.digest for row in rows}
    for view in views:
        wanted -= {row.digest for row in read_batch(view, "train").rows}
        if not wanted:
            return True
    return not wanted


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
