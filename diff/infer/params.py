"""The rules of parameters: content at init, and how their gradients add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.infer.content import Match
from tensortrace.diff.infer.found import Body, Term
from tensortrace.diff.infer.grid import PART, RankGrid
from tensortrace.diff.infer.terms import exchanged, find_term
from tensortrace.diff.infer.values import Candidate


@dataclass(frozen=True)
class Placed:
    """How a parameter lies. ``swap`` says which lines stand elsewhere than ``term`` says, '' if none."""

    term: Term
    dim: int
    of: int
    ndim: int
    vectors: tuple[np.ndarray, ...]
    size: int
    swap: str = ""

    @property
    def split(self) -> bool:
        """Tell whether ranks hold different parts."""
        return f"[{PART}]" in self.term.text

    @property
    def candidate(self) -> Candidate:
        """What activations may be split like."""
        return Candidate(self.term, self.size, self.vectors)


def place(matches: Sequence[Match], shape: tuple[int, ...]) -> Placed | None:
    """Return how the parts of one parameter lie in a whole one of ``shape``; None if in no regular way.

    ``matches`` are in order of the coordinate along the axis of parts.
    """
    along = [m for m in matches if not m.is_whole(shape[m.of])] or list(matches)
    dim, of = along[0].dim, along[0].of
    if any((m.dim, m.of) != (dim, of) for m in along):
        return None
    vectors = tuple(m.index if (m.dim, m.of) == (dim, of) else np.arange(shape[of]) for m in matches)
    name, size = names_of_dims(len(shape))[of], shape[of]
    if term := find_term(vectors, size, name, PART):
        if not term.permutes:
            return Placed(term, dim, of, len(shape), vectors, size)
        straight = find_term([_sorted(v) for v in vectors], size, name, PART)
        return Placed(term, dim, of, len(shape), vectors, size, exchanges(vectors) if straight else "")
    ordered = tuple(_sorted(v) for v in vectors)
    if not (term := find_term(ordered, size, name, PART)):
        ordered = tuple(sorted(ordered, key=lambda v: int(v[0])))
        term = find_term(ordered, size, name, PART)
    return Placed(term, dim, of, len(shape), ordered, size, exchanges(vectors)) if term else None


def straightened(placed: Placed) -> Placed:
    """Return a permuted placement as it would be without the permutation."""
    vectors = tuple(_sorted(v) for v in placed.vectors)
    term = find_term(vectors, placed.size, names_of_dims(placed.ndim)[placed.of], PART)
    assert term is not None, placed.term
    return Placed(term, placed.dim, placed.of, placed.ndim, vectors, placed.size, placed.swap)


def body_of(placed: Placed, grid: RankGrid, gradient: Sequence[str] = ()) -> Body:
    """Return the rule of a placed parameter; ``gradient`` are marks that its gradient has beside."""
    names = list(names_of_dims(placed.ndim))
    local, whole = list(names), list(names)
    if placed.dim != placed.of:
        local[placed.dim], local[placed.of] = names[placed.of], names[placed.dim]
    local[placed.dim] = placed.term.text
    whole[placed.of] = placed.term.whole or placed.term.text.replace(f"[{PART}]", "")
    marks = [] if placed.split or PART not in grid.axes else [f"same:{PART}"]
    turned = placed.dim != placed.of or placed.term.permutes
    kept = [mark for mark in marks if mark.partition(":")[2] not in {g.partition(":")[2] for g in gradient}]
    return Body(
        " ".join([*local, *marks]), " ".join([*local, *kept, *gradient]) if gradient else None,
        placed.term.sizes, placed.term.valid, " ".join(whole) if turned else None,
    )  # fmt: skip


def names_of_dims(ndim: int) -> tuple[str, ...]:
    """Return names for the dimensions of a parameter."""
    return ("o", "i")[:ndim] if ndim <= 2 else tuple(f"d{dim}" for dim in range(ndim))


def joined(parts: Sequence[np.ndarray], placed: Placed, shape: tuple[int, ...]) -> np.ndarray:
    """Return what the parts of a split tensor make; padding is left out."""
    whole = np.zeros(shape, dtype=np.float64)
    for part, vector in zip(parts, placed.vectors, strict=True):
        turned = np.moveaxis(part, placed.dim, 0)
        np.moveaxis(whole, placed.of, 0)[vector[vector >= 0]] = turned[vector >= 0]
    return whole


def constant_match(name: str, value: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> Match | None:
    """Return the match of a tensor whose content says nothing and whose shape is the whole one's."""
    if shapes.get(name) != value.shape or not value.shape:
        return None
    return Match(name, 0, 0, np.arange(value.shape[0]), value.ndim)


def _sorted(vector: np.ndarray) -> np.ndarray:
    """Return positions in ascending order, padding behind."""
    kept = np.sort(vector[vector >= 0])
    return np.concatenate([kept, vector[vector < 0]])


def exchanges(vectors: Sequence[np.ndarray]) -> str:
    """Say which lines stand elsewhere than contiguous parts would have them."""
    texts = []
    for number, vector in enumerate(vectors):
        own = vector[vector >= 0]
        if len(own) and (text := exchanged(own, int(own.min()))):
            texts.append(f"part {number}: {text}")
    if not texts:
        texts = [f"part {n} holds {int(v.min())}:{int(v.max()) + 1}" for n, v in enumerate(vectors) if len(v)]
    return "; ".join(texts[:2]) + ("; …" if len(texts) > 2 else "")
