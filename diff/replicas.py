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
    if like[0].bare:
        return None
    known = [(_distance(item, like[0]), digest) for digest, item in first.items() if not item.bare]
    known += [(0.0, digest) for digest, item in first.items() if item.bare and _is_like(item, like[0])]
    if not known:
        return None
    nearest, right = min(known)
    bare = [item for digest, item in first.items() if item.bare and digest != right]
    least = [_least_distance(item, like[0]) for item in bare]
    others = [distance for distance, digest in known if digest != right]
    return right if nearest * _BY_FAR**2 < min([*others, *least], default=0.0) else None


def left_out(copies: Sequence[Item]) -> tuple[int, ...]:
    """Return the ranks whose copies were left to another rank, which has none that is equal."""
    return tuple(sorted(rank for item in copies if item.bare for rank in item.ranks))


def _is_like(item: Item, wanted: Item) -> bool:
    return item.entry.digest == wanted.entry.digest


def _least_distance(item: Item, wanted: Item) -> float:
    """Return what the square of the distance is at least, as statistics tell where bytes are not there."""
    x, y = item.entry.stats, wanted.entry.stats
    if x is None or y is None:
        return 0.0
    if (x.nan, x.inf) != (y.nan, y.inf):
        return np.inf
    pairs = [(x.l2, y.l2)] if x.finite == y.finite else []
    pairs += [(x.minimum, y.minimum), (x.maximum, y.maximum)] if not x.nan + x.inf else []
    known = [(p - q) ** 2 for p, q in pairs if p is not None and q is not None]
    return max(known, default=0.0)


def _distance(item: Item, wanted: Item) -> float:
    square = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for x, y in zip(one(item).blocks(), one(wanted).blocks(), strict=True):
            square += float(np.sum((x.astype(np.float64) - y) ** 2))
    return square if np.isfinite(square) else np.inf
