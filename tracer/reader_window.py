"""Which steps a trace has that kept the last ones only, and what ended its recording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensortrace.tracer.types import INIT_STEP, Entry, Kind, RankManifest, Triggered, Window


class Span(NamedTuple):
    """Steps from ``first`` to ``last``, both included; none where ``first`` is greater."""

    first: int
    last: int


def kept_of(entries: list[Entry], window: Window | None) -> list[Entry]:
    """Return the entries that a window keeps, and the parameters with which its first step begins.

    The others belong to steps of which something is left because it stands in the same files.
    """
    first = INIT_STEP if window is None else window.first
    before = max((entry.step for entry in entries if entry.step < first), default=None)
    return [
        entry
        for entry in entries
        if entry.step >= first or (entry.step == before and entry.kind is Kind.PARAM)
    ]


def first_kept(manifest: RankManifest | None) -> int:
    """Return the first step that a rank kept whole, INIT_STEP where it dropped none."""
    window = manifest.window if manifest else None
    return INIT_STEP if window is None else window.first


def span(manifest: RankManifest | None, entries: Sequence[Entry]) -> Span:
    """Return the steps that a rank kept, ``init`` among them where it did."""
    first = first_kept(manifest)
    steps = [entry.step for entry in entries if entry.step >= first]
    return Span(min(steps, default=INIT_STEP + 1), max(steps, default=INIT_STEP))


def common(spans: Sequence[Span]) -> Span:
    """Return the steps that all ranks kept."""
    return Span(max(each.first for each in spans), min(each.last for each in spans))


def said(found: Triggered) -> str:
    """Return what set off a trigger, in words."""
    if found.kind is None:
        return f"{found.trigger} in step {found.step}"
    part = "" if found.microbatch is None else f", microbatch {found.microbatch}"
    where = f"{found.kind.value} {found.name} {found.slot}"
    return f"{found.trigger} in step {found.step}{part}: {where}: {found.text}"
