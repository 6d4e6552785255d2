"""The ladder of one trace: how large each tensor is against its own median, and where numbers broke."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator

from tensortrace.cli.render import words
from tensortrace.cli.report.ladder import Cell, Ladder, Rung, build, rung_of, short
from tensortrace.diff.catalog import EVIDENCE_KINDS, Catalog, Item
from tensortrace.diff.causality import Node
from tensortrace.diff.verdict import where
from tensortrace.tracer.types import INIT_STEP, Kind, Stats

KNOWN, BROKEN, UNKNOWN = 0, 1, 2
"""States of a cell: a norm is known, some numbers are not finite, nothing is known."""

MOST_BROKEN = 50
_LEFT_OUT = EVIDENCE_KINDS | {Kind.SCHEDULE}


def norms_of(catalog: Catalog) -> Ladder:
    """Return the ladder of a trace: a cell is (step, state, norm over its median, norm, not finite)."""
    found = list(_norms(catalog))
    norms: dict[Rung, list[float]] = defaultdict(list)
    for node, norm, _ in found:
        if norm:
            norms[rung_of(node)].append(norm)
    medians = {rung: statistics.median(values) for rung, values in norms.items()}
    cells = [(node, _cell(norm, bad, medians.get(rung_of(node)))) for node, norm, bad in found]
    broken = next((where(node) for node, _, bad in found if bad), None)
    return build(cells, first=broken, reasons=(), values=True)


def _cell(norm: float | None, bad: int, median: float | None) -> Cell:
    if norm is None:
        return Cell((UNKNOWN,), 0.0)
    ratio = norm / median if median else 1.0
    weight = 1e30 if bad else abs(math.log(ratio)) if ratio > 0 else 0.0
    return Cell((BROKEN if bad else KNOWN, short(ratio), short(norm), bad), weight)


def out_of_range(catalog: Catalog) -> list[str]:
    """Return the boundaries that hold NaN or Inf, in the order in which they were recorded."""
    found = (node for node, _, bad in _norms(catalog) if bad)
    return [f"{words.moment(at)}: {words.key(at)}" for at in map(where, found)][:MOST_BROKEN]


def _norms(catalog: Catalog) -> Iterator[tuple[Node, float | None, int]]:
    """Yield each boundary in the order of events, with its norm and how many numbers are not finite."""
    for step in ((INIT_STEP,) if catalog.has_init else ()) + catalog.steps:
        held: dict[Node, list[Item]] = defaultdict(list)
        for slot, items in catalog.view(step).items.items():
            if slot.kind not in _LEFT_OUT:
                for item in items:
                    number = None if item.part is None else item.part.number
                    held[Node(step, number, slot)].append(item)
        for node, found in sorted(held.items(), key=lambda e: min(i.entry.event for i in e[1])):
            yield node, *_of_items([item.entry.stats for item in found])


def _of_items(found: list[Stats | None]) -> tuple[float | None, int]:
    """Return the norm over data cells, of what is finite in them, and how many numbers are not."""
    known = [stats for stats in found if stats is not None]
    norms = [stats.l2 for stats in known if stats.l2 is not None]
    bad = sum(stats.nan + stats.inf for stats in known)
    return math.hypot(*norms) if norms or bad else None, bad
