"""From the positions that ranks hold of a dimension to the term that describes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tensortrace.diff.infer.found import Term

MOST_BLOCKS = 8
"""More blocks than that are a stride."""

Run = tuple[int, int]


def find_term(vectors: Sequence[np.ndarray], size: int, name: str, axis: str) -> Term | None:
    """Return the term of a dimension of ``size`` elements of which the ranks of an axis hold ``vectors``.

    ``vectors`` are in order of the coordinate; -1 is padding. None where they follow no regular pattern.
    """
    split = f"{name}[{axis}]"
    if all(len(v) == size and (v == np.arange(size)).all() for v in vectors):
        return Term(name, "")
    together = np.concatenate(vectors)
    lengths = {len(v) for v in vectors}
    if (together < 0).any():
        expected = np.where(np.arange(len(together)) < size, np.arange(len(together)), -1)
        if len(lengths) == 1 and (together == expected).all():
            return Term(split, "", ((name, len(together)),), ((name, size),))
        return None
    if len(together) == size and (together == np.arange(size)).all():
        chunk = -(-size // len(vectors))
        even = [max(0, min(chunk, size - chunk * i)) for i in range(len(vectors))]
        if [len(v) for v in vectors] == even:
            return Term(split, "", () if len(lengths) == 1 else ((name, size),))
        return None
    return _blocks(vectors, size, name, axis) or _groups(vectors, size, name, axis)


def _blocks(vectors: Sequence[np.ndarray], size: int, name: str, axis: str) -> Term | None:
    """Return a term of blocks that are each split over the axis, or each whole on all ranks."""
    runs = _cut([_runs(v) for v in vectors])
    count = len(runs[0])
    if any(len(own) != count for own in runs):
        return None
    found: list[tuple[Run, bool]] = []
    for block in range(count):
        parts = [own[block] for own in runs]
        if len(set(parts)) == 1:
            found.append((parts[0], False))
        elif all(x[1] == y[0] for x, y in pairwise(parts)) and _equal(parts):
            found.append(((parts[0][0], parts[-1][1]), True))
        else:
            return None
    ordered = sorted(run for run, _ in found)
    if ordered[0][0] != 0 or ordered[-1][1] != size or any(x[1] != y[0] for x, y in pairwise(ordered)):
        return None
    if count > MOST_BLOCKS:
        regular = [run for run, _ in found] == ordered and _equal(ordered) and all(s for _, s in found)
        return Term(f"({name}1 {name}2[{axis}])", "", ((f"{name}1", count),)) if regular else None
    names = {run: f"{name}{number}" for number, run in enumerate(ordered, 1)}
    texts = [names[run] + (f"[{axis}]" if is_split else "") for run, is_split in found]
    sizes = tuple((names[run], run[1] - run[0]) for run in ordered)
    text = f"({'|'.join(texts)})"
    if all(is_split for _, is_split in found):
        text = f"({'|'.join(names[run] for run, _ in found)})[{axis}]"
    whole = f"({'|'.join(names[run] for run in ordered)})"
    return Term(text, "" if [run for run, _ in found] == ordered else whole, sizes)


def _groups(vectors: Sequence[np.ndarray], size: int, name: str, axis: str) -> Term | None:
    """Return a term of groups split over the axis whose blocks all stand in the same other order."""
    length = len(vectors[0])
    if any(len(v) != length for v in vectors) or length * len(vectors) != size:
        return None
    for groups in range(length // 2, 0, -1):
        if length % groups:
            continue
        period = length // groups
        split = np.concatenate(vectors).reshape(-1, period)
        inner = split - np.arange(len(split))[:, None] * period
        if not (inner == inner[0]).all() or sorted(inner[0]) != list(range(period)):
            continue
        runs = _runs(inner[0])
        if len(runs) > MOST_BLOCKS:
            return None
        ordered = sorted(runs)
        names = {run: f"{name}{number}" for number, run in enumerate(ordered, 1)}
        sizes = ((f"{name}0", len(split)), *((names[run], run[1] - run[0]) for run in ordered))
        inside = ["|".join(names[run] for run in order) for order in (runs, ordered)]
        return Term(f"({name}0[{axis}] ({inside[0]}))", f"({name}0 ({inside[1]}))", sizes)
    return None


def exchanged(vector: np.ndarray, first: int) -> str:
    """Return in words where runs stand that are not where a contiguous part from ``first`` on has them."""
    wanted = np.arange(first, first + len(vector))
    texts, at = [], 0
    for start, stop in _runs(vector):
        if start != wanted[at]:
            texts.append(f"{at + first}:{at + first + stop - start} holds {start}:{stop}")
        at += stop - start
    return ", ".join(texts[:4]) + (", …" if len(texts) > 4 else "")


def _runs(vector: np.ndarray) -> list[Run]:
    cuts = np.flatnonzero(np.diff(vector) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(vector, cuts) if len(run)]


def _cut(runs: Sequence[Sequence[Run]]) -> list[list[Run]]:
    """Return the runs of all ranks, each cut where a run of another rank begins or ends."""
    edges = sorted({edge for own in runs for run in own for edge in run})
    found = []
    for own in runs:
        marks = ([start, *(e for e in edges if start < e < stop), stop] for start, stop in own)
        found.append([run for edges_of_run in marks for run in pairwise(edges_of_run)])
    return found


def _equal(runs: Sequence[Run]) -> bool:
    return len({stop - start for start, stop in runs}) == 1
