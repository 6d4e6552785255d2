"""Whether ranks of equal parameters hold parts of one sequence: context parallelism, by its inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.infer.found import Term
from tensortrace.diff.infer.grid import PART
from tensortrace.diff.infer.passes import Reference, ids_of, rows_in
from tensortrace.diff.infer.runs import Recorded
from tensortrace.diff.infer.values import Candidate

MOST_ORDERS = 720
"""So many orders of the blocks are tried, to name a swap: of more ranks it goes unnamed."""


@dataclass(frozen=True)
class Context:
    """How the ranks of one line share the positions of a batch, of which the reference has ``length``.

    ``size`` ranks stand beside each other. ``swap`` says which blocks of positions stand elsewhere than a
    layout can say, '' if none.
    """

    size: int
    how: str
    microbatch: int
    reference: Reference
    vectors: tuple[np.ndarray, ...]
    length: int
    rows: int
    swap: str = ""

    def candidates(self) -> list[Candidate]:
        """Return what tensors may be split like: along positions, or along rows and positions in one."""
        text = f"s[{PART}{':zigzag' if self.how == 'zigzag' else ''}]"
        cut = tuple(np.where(v < self.length, v, -1) for v in self.vectors)
        rows = np.arange(self.rows)[:, None] * self.length
        flat = tuple(np.where(v >= 0, rows + v, -1).reshape(-1) for v in cut)
        return [
            Candidate(Term(text, ""), self.length, cut),
            Candidate(Term(f"(b {text})", "", (("b", self.rows),)), self.rows * self.length, flat),
        ]


def find_context(a: Sequence[Recorded], line: Sequence[Recorded]) -> Context | None:
    """Return how ranks that hold equal parameters share positions, None where they were given other rows."""
    for size in range(len(line), 1, -1):
        if len(line) % size == 0 and (found := _shared(a, line[:size])):
            groups = [line[i : i + size] for i in range(size, len(line), size)]
            if all(_shared(a, group) is not None for group in groups):
                return found
    return None


def _shared(a: Sequence[Recorded], ranks: Sequence[Recorded]) -> Context | None:
    for microbatch in sorted(ranks[0].passes):
        parts = [ids_of(own, microbatch) for own in ranks]
        known = [part for part in parts if part is not None and part.ndim == 2 and part.dtype.kind in "iu"]
        if len(known) == len(parts) and len({part.shape for part in known}) == 1 and known[0].shape[1]:
            for own in a:
                for number in sorted(own.passes):
                    if found := _under_some_order(known, own, number, microbatch):
                        return found
    return None


def _under_some_order(
    parts: Sequence[np.ndarray], own: Recorded, number: int, microbatch: int
) -> Context | None:
    theirs = ids_of(own, number)
    together = sum(part.shape[1] for part in parts)
    if theirs is None or theirs.ndim != 2 or not parts[0].shape[1] < theirs.shape[1] <= together:
        return None
    length = theirs.shape[1]
    for how, vectors, swap in _orders(len(parts), parts[0].shape[1]):
        whole = np.empty((len(parts[0]), together), dtype=parts[0].dtype)
        for part, vector in zip(parts, vectors, strict=True):
            whole[:, vector] = part
        behind = whole[:, length:]
        rows = rows_in(whole[:, :length], theirs)
        if rows is None or (behind.size and (behind != behind[0, 0]).any()):
            continue
        reference = Reference(own, own.passes[number], rows, len(theirs))
        return Context(len(parts), how, microbatch, reference, tuple(vectors), length, len(rows), swap)
    return None


def _orders(count: int, each: int) -> Iterator[tuple[str, list[np.ndarray], str]]:
    """Yield the layouts that there are, then every other order of as many blocks, told as a swap."""
    blocks = np.arange(count * each).reshape(count, each)
    yield "block", list(blocks), ""
    halves = np.arange(count * each).reshape(2 * count, -1) if each % 2 == 0 else None
    if halves is not None:
        zigzag = [np.concatenate([halves[i], halves[2 * count - 1 - i]]) for i in range(count)]
        yield "zigzag", zigzag, ""
    for how, pieces in (("block", blocks), ("zigzag", halves)):
        if pieces is None:
            continue
        orders = itertools.islice(itertools.permutations(range(len(pieces))), MOST_ORDERS)
        for order in orders:
            vectors = np.split(np.concatenate([pieces[i] for i in order]), count)
            yield how, vectors, _told(vectors)


def _told(vectors: Sequence[np.ndarray]) -> str:
    texts = []
    for number, vector in enumerate(vectors):
        runs = np.split(vector, np.flatnonzero(np.diff(vector) != 1) + 1)
        texts.append(f"part {number} holds {', '.join(f'{run[0]}:{run[-1] + 1}' for run in runs)}")
    return "; ".join(texts[:4])
