"""Finds where a local tensor's rows or columns stand in whole tensors, by their bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True)
class Match:
    """A local tensor is a part of the whole tensor ``name``.

    Along local dimension ``dim`` it has the lines ``index`` of the whole tensor's dimension ``of``, -1 where
    a line is none of it; along the others it is whole.
    """

    name: str
    dim: int
    of: int
    index: np.ndarray
    ndim: int

    @property
    def transposed(self) -> bool:
        """Tell whether dimensions are exchanged."""
        return self.dim != self.of

    def is_whole(self, size: int) -> bool:
        """Tell whether all of the whole tensor's lines are there, in order."""
        return len(self.index) == size and bool((self.index == np.arange(size)).all())


def is_constant(value: np.ndarray) -> bool:
    """Tell whether all elements are equal, so that content says nothing of their places."""
    flat = value.reshape(-1)
    return flat.size < 2 or bool((flat == flat[0]).all())


class Lines:
    """Every row and column of some whole tensors, by digest."""

    def __init__(self, whole: Mapping[str, np.ndarray]) -> None:
        self._at: dict[bytes, list[tuple[str, int, int]]] = defaultdict(list)
        self.shapes = {name: value.shape for name, value in whole.items()}
        for name, value in whole.items():
            if not is_constant(value):
                for dim in range(value.ndim):
                    for position, digest in enumerate(_digests(value, dim)):
                        self._at[digest].append((name, dim, position))

    def find(self, value: np.ndarray, name: str) -> Match | None:
        """Return the match of most lines, of equally good ones that of the same name; None without any."""
        best: tuple[tuple[int, bool, bool, int], Match] | None = None
        for dim in range(value.ndim):
            digests = _digests(value, dim)
            hits = Counter(key for d in digests for key in {(n, of) for n, of, _ in self._at.get(d, ())})
            for (whole, of), count in hits.items():
                if len(self.shapes[whole]) != value.ndim:
                    continue
                rank = (count * value.size // max(len(digests), 1), whole == name, dim == of, -dim)
                if best is None or rank > best[0]:
                    index = self._index(digests, whole, of)
                    best = (rank, Match(whole, dim, of, index, value.ndim))
        return best[1] if best else None

    def _index(self, digests: Sequence[bytes], name: str, of: int) -> np.ndarray:
        """Return each line's position; of several equal ones that which follows the line before."""
        found = np.full(len(digests), -1, dtype=np.int64)
        used: set[int] = set()
        for i, digest in enumerate(digests):
            where = [p for n, d, p in self._at.get(digest, ()) if n == name and d == of and p not in used]
            if where:
                follows = found[i - 1] + 1 if i else 0
                found[i] = follows if follows in where else where[0]
                used.add(int(found[i]))
        return found


def _digests(value: np.ndarray, dim: int) -> list[bytes]:
    lines = np.ascontiguousarray(np.moveaxis(value, dim, 0)).reshape(value.shape[dim], -1)
    return [xxhash.xxh3_128_digest(line.tobytes()) for line in lines]
