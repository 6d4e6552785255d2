"""How the tensors that ranks hold inside a module meet those of the other run, where nothing declares it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SUM, MOST = "the sum over ranks", "the largest over ranks"

MAX_FACTORS = 12
"""Ways of interleaving that are tried for one dimension."""


class Met(NamedTuple):
    """Both runs' tensor as one array each, and what makes them one, ``""`` where nothing had to be done."""

    how: str
    a: np.ndarray
    b: np.ndarray


def meetings(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> Iterator[Met]:
    """Yield the ways in which ``a``'s and ``b``'s parts, one a rank, may be the same tensor.

    The parts of equal numbers of ranks with equal shapes meet rank by rank, and in no other way. A whole
    tensor meets copies, their sum or the largest of them, and parts cut along the one dimension that is
    shorter, also where each of several blocks of it is cut (heads behind samples, fused projections).
    """
    if not a or not b:
        return
    if len(a) == len(b) and all(x.shape == y.shape for x, y in zip(a, b, strict=True)):
        how = "" if len(a) == 1 else "rank by rank"
        yield Met(how, _flat(a), _flat(b)) if len(a) > 1 else Met(how, a[0], b[0])
        return
    a, b = one_of_copies(a), one_of_copies(b)
    if len(a) == 1:
        yield from _whole_and_parts(a[0], b)
    elif len(b) == 1:
        yield from (Met(met.how, met.b, met.a) for met in _whole_and_parts(b[0], a))


def _whole_and_parts(whole: np.ndarray, parts: Sequence[np.ndarray]) -> Iterator[Met]:
    if len(parts) == 1 and parts[0].shape == whole.shape:
        yield Met("", whole, parts[0])
        return
    if all(part.shape == whole.shape for part in parts):
        yield Met("a copy on each rank", np.stack([whole] * len(parts)), np.stack(parts))
        if whole.dtype.kind in "fc":
            yield Met(SUM, whole, _sum(parts))
        if whole.dtype.kind == "f":
            yield Met(MOST, whole, np.maximum.reduce(list(parts)))
        return
    if any(part.ndim != whole.ndim for part in parts):
        return
    shorter = [d for d in range(whole.ndim) if any(part.shape[d] != whole.shape[d] for part in parts)]
    if len(shorter) == 1 and sum(part.shape[shorter[0]] for part in parts) == whole.shape[shorter[0]]:
        [dim] = shorter
        for factor in _factors([part.shape[dim] for part in parts]):
            blocks = f", in each of {factor} blocks" if factor > 1 else ""
            yield Met(f"cut along dimension {dim}{blocks}", whole, _join(parts, dim, factor))


def _join(parts: Sequence[np.ndarray], dim: int, factor: int) -> np.ndarray:
    """Put parts together of which each has its share of every one of ``factor`` blocks of a dimension."""
    split = [
        part.reshape(*part.shape[:dim], factor, part.shape[dim] // factor, *part.shape[dim + 1 :])
        for part in parts
    ]
    joined = np.concatenate(split, axis=dim + 1)
    shape = parts[0].shape
    return joined.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _factors(sizes: Sequence[int]) -> list[int]:
    common = math.gcd(*sizes)
    return [n for n in range(1, common + 1) if common % n == 0][:MAX_FACTORS]


def one_of_copies(parts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the first of parts that are all the same, else all."""
    first = parts[0]
    same = all(x.shape == first.shape and np.array_equal(x, first, equal_nan=_has_nan(x)) for x in parts[1:])
    return parts[:1] if same else parts


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind in "fc"


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    wide = np.complex128 if parts[0].dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(sum(part.astype(wide) for part in parts))


def _flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in parts])
