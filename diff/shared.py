"""Which ranks' copies differ of blocks that they share beside blocks that are split: ``(q[tp]|k|v)``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tensortrace.diff.compare import EPS
from tensortrace.diff.relaid import RelaidRank
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.geometry import held
from tensortrace.tracer.geometry_cover import odd_replicas
from tensortrace.tracer.types import Entry

ROUND_OFF = {"float64": 16.0, "float32": 16.0}
"""Spacings of their dtype by which copies may differ (relative L2): beside other blocks a product is summed
in another order. Of shorter dtypes it is 1, which is what rounding such a sum makes of it."""


def odd_shared(members: Iterable[tuple[object, Entry]]) -> tuple[int, ...]:
    """Return the ranks whose copy of a shared block is not the one that most ranks hold, in order.

    ``members`` are what ranks hold of one boundary. Where no copy has a majority all ranks are odd. What
    cannot be read is not judged here: whoever compares the tensor says so.
    """
    sharing = [(source, entry) for source, entry in members if isinstance(source, RelaidRank)]
    found: set[int] = set()
    for number in range(max((len(source.shared(entry)) for source, entry in sharing), default=0)):
        groups = [(source, entry) for source, entry in sharing if len(source.shared(entry)) > number]
        try:
            found.update(_odd(groups, number))
        except TraceError:
            continue
    return tuple(sorted(found))


def _odd(members: Sequence[tuple[RelaidRank, Entry]], number: int) -> set[int]:
    parts, labels = [], {}
    known: dict[object, list[np.ndarray]] = defaultdict(list)
    for source, entry in members:
        view = source.shared(entry)[number]
        part = held(source.rank, view.shard, source.mesh, view.local_shape)
        value = source.read_shared(entry, view)
        parts.append(part)
        others = known[part.region, part.partial]
        same = (i for i, other in enumerate(others) if _equal(value, other, entry.dtype))
        labels[source.rank] = str(next(same, len(others)))
        if labels[source.rank] == str(len(others)):
            others.append(value)
    return {rank for problem in odd_replicas(parts, labels) for rank in problem.ranks}


def _equal(x: np.ndarray, y: np.ndarray, dtype: str) -> bool:
    if np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"):
        return True
    if dtype not in EPS or x.dtype.kind != "f":
        return False
    wide = y.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error, norm = float(np.linalg.norm(x.astype(np.float64) - wide)), float(np.linalg.norm(wide))
    return error <= ROUND_OFF.get(dtype, 1.0) * EPS[dtype] * norm
