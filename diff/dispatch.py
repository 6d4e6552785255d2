"""Rows that a program sent to where they are worked on: which row of one run is which of the other.

An expert is given tokens of the whole batch, in an order and number that depend on routing, padding and the
layout. Its rows follow no dimension of the batch. They are matched by what the module was given: equal tokens
have equal hidden states up to round-off.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

CLOSE = 1e-3
"""Relative distance up to which two rows are the same token's: far above round-off, far below two tokens'."""

BLOCK = 512
"""Rows whose distances are held at a time."""


class Matching(NamedTuple):
    """Row numbers of ``a`` and of ``b`` that belong together, and how many of each have no counterpart."""

    rows_a: np.ndarray
    rows_b: np.ndarray
    only_a: int
    only_b: int


def match_rows(a: np.ndarray, b: np.ndarray) -> Matching:
    """Match rows of two arrays [n, ...] and [m, ...], each with its mutual nearest.

    Rows of another shape are never the same. Rows that are equal within their run, such as those of a
    token that went to two experts, are matched in order.
    """
    flat = (x.reshape(len(x), math.prod(x.shape[1:])) for x in (a, b))  # an expert may be given nothing
    if a.shape[1:] != b.shape[1:]:
        return Matching(np.zeros(0, np.int64), np.zeros(0, np.int64), len(a), len(b))
    left, right = (np.ascontiguousarray(x, dtype=np.float64) for x in flat)
    exact_a, exact_b = _equal_rows(left, right)
    rest_a, rest_b = (np.setdiff1d(np.arange(len(x)), y) for x, y in ((left, exact_a), (right, exact_b)))
    near_a, near_b = _near_rows(left[rest_a], right[rest_b])
    rows_a = np.concatenate([exact_a, rest_a[near_a]])
    rows_b = np.concatenate([exact_b, rest_b[near_b]])
    order = np.argsort(rows_a, kind="stable")
    return Matching(rows_a[order], rows_b[order], len(left) - len(rows_a), len(right) - len(rows_b))


def _equal_rows(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of rows that are equal in every bit, as multisets."""
    waiting: dict[bytes, list[int]] = {}
    for number in range(len(b) - 1, -1, -1):
        waiting.setdefault(b[number].tobytes(), []).append(number)
    found = [(n, held.pop()) for n in range(len(a)) if (held := waiting.get(a[n].tobytes()))]
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _near_rows(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of rows that are close, where equal rows of one run stand for one."""
    groups_a, groups_b = _groups(a), _groups(b)
    near_a, near_b = _nearest(a[[g[0] for g in groups_a]], b[[g[0] for g in groups_b]])
    found = [
        p for x, y in zip(near_a, near_b, strict=True) for p in zip(groups_a[x], groups_b[y], strict=False)
    ]
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _groups(rows: np.ndarray) -> list[list[int]]:
    """Return the numbers of the rows that are equal in every bit."""
    groups: dict[bytes, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.tobytes(), []).append(number)
    return list(groups.values())


def _nearest(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are each other's nearest, and close."""
    if not len(a) or not len(b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    best_b, best_a = np.zeros(len(a), np.int64), np.zeros(len(b), np.int64)
    least_a = np.full(len(b), np.inf)
    size_a, size_b = (np.einsum("ij,ij->i", x, x) for x in (a, b))
    for start in range(0, len(a), BLOCK):
        block = a[start : start + BLOCK]
        distance = size_a[start : start + BLOCK, None] + size_b[None] - 2 * block @ b.T
        best_b[start : start + BLOCK] = distance.argmin(axis=1)
        nearest = distance.argmin(axis=0)
        value = distance[nearest, np.arange(len(b))]
        closer = value < least_a
        best_a[closer], least_a[closer] = nearest[closer] + start, value[closer]
    rows = np.flatnonzero(best_a[best_b] == np.arange(len(a)))
    error = np.linalg.norm(a[rows] - b[best_b[rows]], axis=1)
    kept = rows[error <= CLOSE * np.sqrt(size_a[rows])]
    return kept, best_b[kept]
