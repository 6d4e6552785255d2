"""Which ranks hold a copy that differs from the other ranks' copies of the same tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.logical import Merged
from tensortrace.diff.stream import one


def odd_ranks(copies: Sequence[Item], like: Sequence[Item] = ()) -> tuple[int, ...]:
    """Return the ranks whose copy is not the one that most ranks hold; empty where all agree.

    Where no copy has a majority, the right one is that by far nearest to the tensor of ``like`` (the other
    run's); where there is none, all ranks are odd. Empty too where the shards say that these are no copies.
    """
    placements = (p.kind for i in copies if i.entry.shard for p in i.entry.shard.placements)
    if not {"partial", "data"}.isdisjoint(placements):
        return ()
    often = Counter(item.entry.digest for item in copies)
    if len(often) < 2:
        return ()
    most = max(often.values())
    leaders = [d for d, count in often.items() if count == most]
    right = leaders[0] if len(leaders) == 1 else _nearest(copies, leaders, like)
    return tuple(sorted(rank for item in copies if item.entry.digest != right for rank in item.ranks))


def odd_members(items: Sequence[Item]) -> tuple[int, ...]:
    """Return the ranks whose part of a tensor differs from the part of their replicas in the same cell."""
    return tuple(sorted({rank for i in items if isinstance(i.source, Merged) for rank in i.source.odd}))


def values_of(copies: Sequence[Item]) -> str:
    """Return in words which ranks hold which value, where some hold the same; empty where none do."""
    groups: dict[str, list[int]] = {}
    for item in copies:
        groups.setdefault(item.entry.digest, []).extend(item.ranks)
    if len(groups) < 2 or all(len(ranks) == 1 for ranks in groups.values()):
        return ""
    told = [f"rank {', '.join(map(str, sorted(ranks)))}" for ranks in groups.values()]
    return f"{told[0]} hold{'s' if ', ' not in told[0] else ''} one value, {', '.join(told[1:])} another"


_BY_FAR = 10.0


def _nearest(copies: Sequence[Item], digests: Sequence[str], like: Sequence[Item]) -> str | None:
    first = {d: next(i for i in copies if i.entry.digest == d) for d in digests}
    if not like or any(i.entry.local_shape != like[0].entry.local_shape for i in first.values()):
        return None
    if any(item.bare for item in (*first.values(), *like)):
        return None
    found = sorted((_distance(item, like[0]), digest) for digest, item in first.items())
    return found[0][1] if found[0][0] * _BY_FAR**2 < found[1][0] else None


def _distance(item: Item, wanted: Item) -> float:
    square = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for x, y in zip(one(item).blocks(), one(wanted).blocks(), strict=True):
            square += float(np.sum((x.astype(np.float64) - y) ** 2))
    return square if np.isfinite(square) else np.inf
