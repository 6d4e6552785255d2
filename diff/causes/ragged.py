"""Right values in the wrong places within rows of unequal length: heads that were not moved, shifts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.causes.arrangement import MOST_ELEMENTS, MOST_HEADS
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

_KINDS = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRAD})
_Turn = Callable[[np.ndarray, int], np.ndarray]


def transposed(case: Case) -> Iterator[Proposal]:
    """Propose that heads were flattened without moving them, or moved twice, in rows with padding.

    The mistake is undone in b, whose rows are known with their padding: it mixes positions.
    """
    loaded, slot = _rows_of(case), case.origin.node.slot
    if loaded is None or loaded.a.ndim != 2:
        return
    rows = [_padded_row(owner, case) for owner in loaded.owners]
    if any(row is None or row.ndim != 2 for row in rows):
        return
    known = [row for row in rows if row is not None]
    width = known[0].shape[-1]
    counts = [h for h in range(2, min(width, MOST_HEADS) + 1) if width % h == 0]
    turns: tuple[tuple[str, _Turn], ...] = (
        ("{} heads were flattened without moving them behind the positions", _gathered),
        ("{} heads were moved before the positions although they were not", _scattered),
    )
    for heads in counts:
        for words, undo in turns:
            undone = [
                undo(row, heads)[owner.start : owner.start + length]
                for row, owner, length in zip(known, loaded.owners, loaded.lengths, strict=True)
            ]
            if any(len(x) != n for x, n in zip(undone, loaded.lengths, strict=True)):
                continue
            yield Proposal(
                "layout.transposed", f"{slot.name}: {words.format(heads)}", [np.concatenate(undone)],
                [loaded.a], [loaded.b], tried=2 * len(counts),
            )  # fmt: skip


def _gathered(row: np.ndarray, heads: int) -> np.ndarray:
    """Undo: read [positions, width] as [heads, positions, part], and put the heads of a position together."""
    positions, width = row.shape
    return np.asarray(row.reshape(heads, positions, width // heads).swapaxes(0, 1).reshape(positions, width))


def _scattered(row: np.ndarray, heads: int) -> np.ndarray:
    positions, width = row.shape
    return np.asarray(row.reshape(positions, heads, width // heads).swapaxes(0, 1).reshape(positions, width))


def shifted(case: Case) -> Iterator[Proposal]:
    """Propose that each row moved along its positions, and zeros or the edge moved in."""
    loaded, slot = _rows_of(case), case.origin.node.slot
    if loaded is None:
        return
    for by in (1, -1, 2, -2):
        if 3 * abs(by) > float(np.mean(loaded.lengths)):
            continue
        for edge in ("zeros", "the edge"):
            mistaken = [_moved(x, y, by, edge) for x, y in _row_pairs(loaded)]
            text = f"{slot.name} is shifted by {by:+d} along the positions of each row, {edge} moved in"
            yield Proposal(
                "layout.shifted", text, [np.concatenate(mistaken)], [loaded.b], [loaded.a], float(by),
                "places", tried=8,
            )  # fmt: skip


def _row_pairs(loaded: Assembled) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ends = np.cumsum(loaded.lengths)[:-1]
    return zip(np.split(loaded.a, ends), np.split(loaded.b, ends), strict=True)


def _moved(a: np.ndarray, b: np.ndarray, by: int, edge: str) -> np.ndarray:
    """Return a's row moved; of what comes from behind its end, which is padding, b's own values are taken."""
    if len(a) <= abs(by):
        return b if by < 0 else np.zeros_like(a)
    if by < 0:
        return np.concatenate([a[-by:], b[by:]])
    first = np.zeros_like(a[:1]) if edge == "zeros" else a[:1]
    return np.concatenate([first] * by + [a[:-by]])


def _rows_of(case: Case) -> Assembled | None:
    """Return an origin that is put together from rows of unequal length, None where it is none."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    if loaded is None or slot.kind not in _KINDS or loaded.exact or loaded.a.size > MOST_ELEMENTS:
        return None
    ragged = len(set(loaded.lengths)) > 1
    return loaded if ragged and np.isfinite(loaded.a).all() and np.isfinite(loaded.b).all() else None


def _padded_row(row: Row, case: Case) -> np.ndarray | None:
    """Return one row of b with its padding [positions, …]; None where its place is not known."""
    extent = case.pair.pairing.extents_b.get(row.part)
    items: Sequence[Item] = case.pair.b.items.get(case.origin.node.slot, ())
    item = next((i for i in items if i.part == row.part), None)
    if extent is None or item is None or extent.packed or extent.time_major:
        return None
    if item.entry.local_shape[:2] not in {(extent.rows, n) for n in (extent.positions, extent.answers)}:
        return None
    return np.asarray(item.read()[row.number])
