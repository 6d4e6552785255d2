"""A loss that every rank of one run computes of all ranks' rows: it is the whole one of the other run.

Contrastive losses over gathered rows may be computed so, and their gradients averaged. Sums, counts and
labels are compared rank by rank with those of all ranks of the other run together; what a row weighs, only
among rows: how often its gradient comes back to it depends on how rows were gathered, and shows in gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.rows import Row

Reading = Callable[[Sequence[Item]], np.ndarray]


def rank_by_rank(a: Sequence[Item], b: Sequence[Item], whole: str, read: Reading) -> Assembled:
    """Compare what each rank of the run ``whole`` has with what all ranks of the other have together.

    ``read`` returns one array of several items. One entry stands for each rank.
    """
    mine, others = (a, b) if whole == "a" else (b, a)
    of_ranks: dict[int, list[Item]] = {}
    for item in mine:
        of_ranks.setdefault(item.cell, []).append(item)
    together = read(others)
    found = [(np.atleast_1d(read(of_ranks[rank])), np.atleast_1d(together)) for rank in sorted(of_ranks)]
    left, right = (np.concatenate([pair[side] for pair in found]) for side in (0, 1))
    owners = [Row(part, 0, 0, 0, b"") for r in sorted(of_ranks) if (part := of_ranks[r][0].part)]
    if whole == "a":
        return Assembled(left, right)
    return Assembled(right, left, tuple(owners), tuple(len(one) for one, _ in found))
