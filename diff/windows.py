"""Traces that kept their last steps only: what all ranks have in common is what is compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.reader_window import Span, common, said, span
from tensortrace.tracer.types import INIT_STEP, Entry, Kind, Window


def windowed(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Return a trace with the steps that all ranks kept, and notes of what was not kept and why.

    The parameters that a rank has of the step before are those that the first one begins with, as ``start``,
    which a recording with ``--steps`` has too. Raises BadRequest where the ranks have no step in common.
    """
    if not any(rank.manifest and rank.manifest.window for rank in trace.ranks):
        return trace, ()
    spans = {rank.rank: span(rank.manifest, rank.entries) for rank in trace.ranks}
    shared = common(list(spans.values()))
    if shared.last < shared.first:
        raise BadRequest(
            f"trace {trace.path}: its ranks kept no step in common", found=_listed(spans),
            remedy="record with a larger --keep-last: ranks end their windows by themselves",
        )  # fmt: skip
    ended = any(r.manifest and r.manifest.window and r.manifest.window.last is not None for r in trace.ranks)
    window = Window(shared.first, shared.last if ended else None)
    ranks = tuple(_within(rank, shared, window) for rank in trace.ranks)
    return Trace(trace.path, trace.manifest, ranks, trace.problems), tuple(_notes(trace, spans, shared))


def _within(rank: RankTrace, shared: Span, window: Window) -> RankTrace:
    found = copy.copy(rank)
    found.entries = tuple(_entries(rank.entries, shared))
    if rank.manifest is not None:
        lost = max(rank.manifest.boundaries - len(rank.entries), 0)
        found.manifest = replace(rank.manifest, window=window, boundaries=len(found.entries) + lost)
    return found


def _entries(entries: Sequence[Entry], shared: Span) -> Iterator[Entry]:
    """Yield the entries of the common steps, after the parameters that the first of them begins with."""
    begins = {entry.name for entry in entries if (entry.step, entry.slot) == (shared.first, "start")}
    before = [e for e in entries if e.step < shared.first and e.kind is Kind.PARAM and e.slot in _VALUES]
    latest = {entry.name: entry for entry in sorted(before, key=lambda e: (e.step, e.event))}
    if shared.first > INIT_STEP:
        for name, entry in latest.items():
            if name not in begins:
                yield replace(entry, step=shared.first, slot="start", call=0)
    yield from (entry for entry in entries if shared.first <= entry.step <= shared.last)


_VALUES = ("model", "start")


def _notes(trace: Trace, spans: dict[int, Span], shared: Span) -> Iterator[str]:
    name = trace.path.name
    promise = next(r.manifest.promise for r in trace.ranks if r.manifest and r.manifest.window)
    if any(
        rank.manifest and rank.manifest.window and rank.manifest.window.first > INIT_STEP
        for rank in trace.ranks
    ):
        yield (
            f"{name} keeps the last {promise.keep_last} steps: those before step {shared.first} were not "
            "kept, and are not compared"
        )
    if len(set(spans.values())) > 1:
        yield f"{name}: its ranks kept {_listed(spans)}; compared are steps {shared.first}-{shared.last}"
    for rank in trace.ranks:
        window = rank.manifest.window if rank.manifest else None
        if window is not None and window.triggered is not None:
            yield f"{name}: rank {rank.rank} ended its recording on {said(window.triggered)}"


def _listed(spans: dict[int, Span]) -> str:
    of_span: dict[Span, list[int]] = {}
    for rank, kept in spans.items():
        of_span.setdefault(kept, []).append(rank)
    told = []
    for (first, last), ranks in list(of_span.items())[:_SHOWN]:
        more = ", …" if len(ranks) > _SHOWN else ""
        told.append(f"steps {max(first, 0)}-{last} on rank {', '.join(map(str, ranks[:_SHOWN]))}{more}")
    return "; ".join(told)


_SHOWN = 8
