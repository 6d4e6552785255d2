"""How a parameter lies that is constant at first, from what the first step made of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tensortrace.diff.infer.grid import PART
from tensortrace.diff.infer.params import Placed, exchanges, names_of_dims
from tensortrace.diff.infer.runs import Recorded
from tensortrace.diff.infer.terms import find_term
from tensortrace.diff.infer.values import CLOSE, Candidate, distance
from tensortrace.tracer.types import Entry

MOST_ORDERS = 24


class Fit(NamedTuple):
    """One way in which parts make the whole; where it is a permutation, ``placed.swap`` says of what."""

    placed: Placed
    error: float


def fits(
    parts: Sequence[np.ndarray], whole: np.ndarray, candidates: Sequence[Candidate], *, scaled: bool
) -> list[Fit]:
    """Return how parts of a change make the whole change, the best first; empty where it tells nothing.

    Contiguous parts and those that other parameters have are looked at, and only if none of these fit the
    same with blocks exchanged. ``scaled`` allows one positive factor.
    """
    if not np.any(whole) or any(part.ndim != whole.ndim for part in parts):
        return []
    straight = list(_straight(parts, whole, candidates))
    found = [fit for dim, vectors in straight if (fit := _fit(parts, whole, dim, vectors, vectors, scaled))]
    if not found:
        found = [
            fit
            for dim, vectors in straight
            for other in itertools.islice(_exchanged(vectors), MOST_ORDERS)
            if (fit := _fit(parts, whole, dim, vectors, other, scaled))
        ]
    return sorted(found, key=lambda fit: fit.error)


def changes(
    theirs: Recorded, name: str, line: Sequence[tuple[Recorded, Entry]]
) -> Iterator[tuple[str, list[np.ndarray], np.ndarray, bool]]:
    """Yield what the first step did to a parameter's parts and to the whole one: its update, its gradient.

    Each comes with its name and with whether the two may differ by a factor.
    """
    if name in theirs.later and all(entry.name in own.later for own, entry in line):
        parts = [_change(own, entry) for own, entry in line]
        yield "its first update", parts, _change(theirs, theirs.params[name]), False
    if name in theirs.grads and all(entry.name in own.grads for own, entry in line):
        parts = [own.read(own.grads[entry.name]).astype(np.float64) for own, entry in line]
        yield "its first gradient", parts, theirs.read(theirs.grads[name]).astype(np.float64), True


def _change(own: Recorded, entry: Entry) -> np.ndarray:
    """Return by how much the first step changed a parameter, in float64."""
    return own.read(own.later[entry.name]).astype(np.float64) - own.read(entry).astype(np.float64)


def _straight(
    parts: Sequence[np.ndarray], whole: np.ndarray, candidates: Sequence[Candidate]
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    seen = set()
    for dim, size in enumerate(whole.shape):
        rest = whole.shape[:dim] + whole.shape[dim + 1 :]
        if any(part.shape[:dim] + part.shape[dim + 1 :] != rest for part in parts):
            continue
        lengths = [part.shape[dim] for part in parts]
        ends = np.cumsum([0, *lengths])
        ways = [tuple(np.arange(a, b) for a, b in itertools.pairwise(ends))] if ends[-1] == size else []
        ways += [c.vectors for c in candidates if c.size == size and [len(v) for v in c.vectors] == lengths]
        for vectors in ways:
            key = (dim, *(v.tobytes() for v in vectors))
            if key not in seen:
                seen.add(key)
                yield dim, vectors


def _exchanged(vectors: tuple[np.ndarray, ...]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the parts on other ranks, then the blocks of all parts in another order."""
    if len({len(v) for v in vectors}) == 1:
        yield from itertools.islice(itertools.permutations(vectors), 1, None)
    runs = [np.split(v, np.flatnonzero(np.diff(v) != 1) + 1) for v in vectors]
    if len({len(own) for own in runs}) == 1:
        for order in itertools.islice(itertools.permutations(range(len(runs[0]))), 1, None):
            yield tuple(np.concatenate([own[i] for i in order]) for own in runs)


def _fit(
    parts: Sequence[np.ndarray], whole: np.ndarray, dim: int, straight: tuple[np.ndarray, ...],
    vectors: tuple[np.ndarray, ...], scaled: bool,
) -> Fit | None:  # fmt: skip
    value = np.full(whole.shape, np.nan)
    for part, vector in zip(parts, vectors, strict=True):
        if len(vector) != part.shape[dim]:
            return None
        kept = vector >= 0
        np.moveaxis(value, dim, 0)[vector[kept]] = np.moveaxis(part, dim, 0)[kept]
    error = distance(value, whole, scaled=scaled)
    term = find_term(straight, whole.shape[dim], names_of_dims(whole.ndim)[dim], PART)
    if not error < CLOSE or term is None:
        return None
    swap = "" if vectors is straight else exchanges(vectors)
    return Fit(Placed(term, dim, dim, whole.ndim, straight, whole.shape[dim], swap), error)
