"""Compares tensors of modules that see chosen tokens of the batch: experts, and what is inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable, same_everywhere
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.dispatch import Matching, match_rows
from tensortrace.diff.plan.comparison import StepPair
from tensortrace.diff.rows import Batch, Row
from tensortrace.tracer.types import Kind

Side = dict[Part, Item]


def by_dispatch(
    slot: Slot,
    a: Sequence[Item],
    b: Sequence[Item],
    pair: StepPair,
    scale_b: Callable[[Row], float] | None = None,
) -> Assembled | None:
    """Return both sides with matching rows, where the rows of a module's own input tell which they are.

    Rows without a counterpart are left out, as far as they may be padding: that is routed like any token,
    and there is more of it where rows are padded further. None where no input of the module, or of one
    around it, has as many rows.

    Raises NotComparable where more rows are without counterpart than there is padding, or where the rows'
    gradients have different factors.
    """
    side_a, side_b = _by_part(a), _by_part(b)
    if not _same_rows(side_a, side_b):
        return None
    matching = next(_matchings(slot, side_a, side_b, pair), None)
    if matching is None:
        return None
    for name, batch, left in (("a", pair.batch_a, matching.only_a), ("b", pair.batch_b, matching.only_b)):
        if left > (padding := _padding(batch)):
            more = f"{left} have no counterpart, and {padding} tokens are padding"
            raise NotComparable(f"of the rows that {slot.name} was given in {name} {more}")
    left, right = _stacked(side_a)[matching.rows_a], _stacked(side_b)[matching.rows_b]
    return Assembled(left, right / _one_scale(pair, scale_b) if scale_b else right)


def _matchings(slot: Slot, a: Side, b: Side, pair: StepPair) -> Iterator[Matching]:
    """Yield how rows match by the input of the module, the outermost around it with as many rows first."""
    parts = slot.name.split(".")
    for length in range(1, len(parts) + 1):
        given = Slot(slot.phase, Kind.ACTIVATION, ".".join(parts[:length]), "in.0", slot.call)
        found_a, found_b = (_given(given, side, view) for side, view in ((a, pair.a), (b, pair.b)))
        if found_a is None or found_b is None or not _same_rows(found_a, found_b):
            continue
        if not same_everywhere((*found_a.values(), *found_b.values())):  # positions are no rows of the batch
            yield match_rows(_stacked(found_a), _stacked(found_b))


def _given(slot: Slot, side: Side, view: StepView) -> Side | None:
    """Return a module's input in the same parts, None where it is not of as many rows in each."""
    found = {part: item for part, item in _by_part(view.items.get(slot, ())).items() if part in side}
    if found.keys() != side.keys() or any(
        len(item.entry.local_shape) < 2 or item.entry.local_shape[0] != side[part].entry.local_shape[0]
        for part, item in found.items()
    ):
        return None
    return found


def _same_rows(a: Side, b: Side) -> bool:
    """Tell whether the tensors of all parts have rows of one shape."""
    shapes = [item.entry.local_shape for side in (a, b) for item in side.values()]
    return all(shapes) and len({shape[1:] for shape in shapes}) == 1


def _by_part(items: Sequence[Item]) -> Side:
    return {item.part: item for item in items if item.part is not None}


def _stacked(side: Side) -> np.ndarray:
    return np.concatenate([side[part].read() for part in sorted(side)])


def _padding(batch: Batch) -> int:
    held = sum(extent.rows * (extent.positions or 1) for extent in batch.extents.values())
    rows = (row for row in batch.rows if not row.idle)
    return held - sum(row.stop - row.start if batch.extents[row.part].positions else 1 for row in rows)


def _one_scale(pair: StepPair, scale_b: Callable[[Row], float]) -> float:
    scales = {scale_b(row) for _, row in pair.pairing.pairs}
    if not scales:
        raise NotComparable("no rows were recorded, so that no token's weight is known")
    if len(scales) != 1 and not np.allclose(list(scales), min(scales), rtol=1e-5, atol=0):
        raise NotComparable("tokens of several parts weigh differently, and which row is whose is not known")
    return scales.pop()
