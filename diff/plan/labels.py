"""Compares the labels of losses that programs select or cut in other ways: which there are, not where.

A program may give a loss the labels of selected tokens only, or of a chunk of tokens at a time. Which row
each label belongs to is then not known from its place; that the same labels are there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind


def is_target(slot: Slot) -> bool:
    """Tell whether a boundary holds the labels that a loss was given."""
    return slot.kind == Kind.LOSS and slot.slot == "target"


def cut_otherwise(slot: Slot, pair: StepPair) -> bool:
    """Tell whether the runs give the labels of a loss in different numbers of calls."""
    if not is_target(slot):
        return False
    calls = [
        {s.call for s in view.named(Kind.LOSS, slot.name) if (s.slot, s.phase) == (slot.slot, slot.phase)}
        for view in (pair.a, pair.b)
    ]
    return all(calls) and calls[0] != calls[1]


def labels_in_order(a: Sequence[Item], b: Sequence[Item]) -> Assembled:
    """Return the valid labels of both runs, each in rising order."""
    return Assembled(sorted_labels(a), sorted_labels(b))


def where_both_count(loaded: Assembled, a: Sequence[Item], b: Sequence[Item]) -> Assembled:
    """Return labels without those that either run's function ignores, where a mask may act behind it.

    What a mask leaves out is told by the count, and its label may be anything.
    """
    metas = [item.entry.meta for item in (*a, *b)]
    index = metas[0].ignore_index
    masked = any(meta.reduction == "none" for meta in metas)
    if index is None or not masked or any(meta.ignore_index != index for meta in metas):
        return loaded
    either = (loaded.a == index) | (loaded.b == index)
    return loaded._replace(a=np.where(either, index, loaded.a), b=np.where(either, index, loaded.b))


def as_rows(loaded: Assembled, pairing: Pairing) -> Assembled:
    """Return labels that are numbers of rows of the batch with the numbers that the rows have in ``a``.

    Contrastive losses tell which row of the batch belongs to which: in another order of rows the same one
    has another number. A row's number is that in its own part, or in what all ranks gather of a microbatch.
    """
    pairs = [p for p in pairing.pairs if p[1].part in {row.part for row in loaded.owners}]
    if np.array_equal(loaded.a, loaded.b) or not loaded.a.shape == loaded.b.shape == (len(pairs),):
        return loaded
    meant = [
        [_meant([p[side] for p in pairs], labels.tolist(), gathered) for gathered in (False, True)]
        for side, labels in enumerate((loaded.a, loaded.b))
    ]
    other = {id(y): id(x) for x, y in pairs}
    for in_b in meant[1]:
        rows = [other.get(id(row)) for row in in_b]
        if None not in rows and any(rows == [id(row) for row in in_a] for in_a in meant[0]):
            return loaded._replace(b=loaded.a)
    return loaded


def _meant(owners: Sequence[Row], labels: Sequence[int], gathered: bool) -> list[Row | None]:
    """Return the row that each label names, None where there is none of that number."""
    numbered: dict[tuple[object, int], Row] = {}
    counts: Counter[object] = Counter()
    for row in sorted(owners, key=lambda row: (row.part, row.number)):
        group = row.part.number if gathered else row.part
        numbered[group, counts[group]] = row
        counts[group] += 1
    groups = [row.part.number if gathered else row.part for row in owners]
    return [numbered.get(key) for key in zip(groups, labels, strict=True)]


def sorted_labels(items: Sequence[Item]) -> np.ndarray:
    """Return all valid labels in rising order."""
    return np.sort(np.concatenate([_valid(item) for item in items]))


def _valid(item: Item) -> np.ndarray:
    labels = np.ravel(item.read())
    ignored = item.entry.meta.ignore_index
    return labels if ignored is None else labels[labels != ignored]
