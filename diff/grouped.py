"""Tensors of one entry for a pair, or a group, of rows: chosen against rejected, answers to one prompt.

The rows of a group follow each other, or each lies in another of as many equal blocks of the batch. Which
entry of one run is which of the other is known where the groups of both runs hold the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.extent import Extent
from tensortrace.diff.orders import distance
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row

Side = dict[Part, Item]
Found = tuple[np.ndarray, np.ndarray, tuple[Row, ...], tuple[int, ...]]
"""Both sides in a's order, with the first row of each group of ``b``, and 1 for each."""

Member = Callable[[int, int, int], int]
"""From the number of a row, of groups and of rows in a group to the group that it is in."""

_LAYOUTS: tuple[Member, ...] = (lambda row, groups, size: row // size, lambda row, groups, size: row % groups)
"""Rows of a group one after the other, or each in a block of its own."""


def of_groups(
    a: Side, b: Side, pairing: Pairing, scale_b: Callable[[Row], float] | None = None
) -> Found | None:
    """Return both sides with matching groups of rows; None where they hold no entry for each group.

    ``scale_b`` divides the entries of ``b``, by the factor of their rows. Where the rows allow both layouts,
    the one in which the values agree better is taken.
    """
    size = _size([(a, pairing.extents_a), (b, pairing.extents_b)])
    if size is None or any(x.packed or y.packed for x, y in pairing.pairs):
        return None
    found = [
        laid
        for layout in _LAYOUTS
        if (pairs := _matching(layout, a, b, pairing, size)) and (laid := _laid(a, b, pairs, scale_b))
    ]
    return min(found, key=lambda f: distance(f[0], f[1]), default=None)


def _size(sides: Sequence[tuple[Side, dict[Part, Extent]]]) -> int | None:
    """Return how many rows a group has, None where the first dimension is no number of groups."""
    sizes = set()
    for side, extents in sides:
        for part, item in side.items():
            shape = item.entry.local_shape
            if part not in extents or not shape or not shape[0] or extents[part].rows % shape[0]:
                return None
            sizes.add(extents[part].rows // shape[0])
    shapes = {item.entry.local_shape[1:] for side, _ in sides for item in side.values()}
    size = sizes.pop() if len(sizes) == len(shapes) == 1 else 1
    return size if size > 1 else None


Group = tuple[Part, int]


def _matching(
    layout: Member, a: Side, b: Side, pairing: Pairing, size: int
) -> dict[Group, tuple[Group, Row]] | None:
    """Return the group of ``b`` that each of ``a`` is, by their rows; None where groups are not the same."""
    found: dict[Group, tuple[Group, Row]] = {}
    members: dict[Group, int] = {}
    for x, y in pairing.pairs:
        if x.part not in a or y.part not in b:
            continue
        of_a, of_b = (
            (row.part, layout(row.number, extents[row.part].rows // size, size))
            for row, extents in ((x, pairing.extents_a), (y, pairing.extents_b))
        )
        if found.setdefault(of_a, (of_b, y))[0] != of_b:
            return None
        members[of_a] = members.get(of_a, 0) + 1
    groups = sum(item.entry.local_shape[0] for item in a.values())
    others = {of_b for of_b, _ in found.values()}
    whole = set(members.values()) == {size} and len(found) == len(others) == groups
    return found if whole else None


def _laid(
    a: Side, b: Side, pairs: dict[Group, tuple[Group, Row]], scale_b: Callable[[Row], float] | None
) -> Found:
    values_a, values_b = ({part: item.read() for part, item in side.items()} for side in (a, b))
    left = np.stack([values_a[part][number] for part, number in sorted(pairs)])
    right = np.stack(
        [
            values_b[part][number] / scale_b(row) if scale_b else values_b[part][number]
            for (part, number), row in (pairs[group] for group in sorted(pairs))
        ]
    )
    owners = tuple(pairs[group][1] for group in sorted(pairs))
    return left, right, owners, (1,) * len(owners)
