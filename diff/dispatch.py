"""Rows that a program sent to where they are worked on: which row of one run is which of the other.

An expert is given tokens of the whole batch, in an order and number that depend on routing, padding and the
layout. Its rows follow no dimension of the batch. They are matched by what the module was given: equal tokens
have equal hidden states up to round-off. Tokens whose hidden states are equal, such as those that begin rows
alike, are told apart by something else, their gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

CLOSE = 1e-3
"""Relative distance up to which two rows are the same token's: far above round-off, far below two tokens'."""

BLOCK = 512
"""Rows whose distances are held at a time."""

_ROUNDS = 8
"""How often the nearest pairs of equal rows are taken, before those that are left meet in order."""


class Matching(NamedTuple):
    """Row numbers of ``a`` and of ``b`` that belong together, and how many of each have no counterpart."""

    rows_a: np.ndarray
    rows_b: np.ndarray
    only_a: int
    only_b: int


Sides = tuple[np.ndarray, np.ndarray]


def match_rows(a: np.ndarray, b: np.ndarray, told_by: Sides | None = None) -> Matching:
    """Match rows of two arrays [n, ...] and [m, ...] that are close, each with one at most.

    Rows of another shape are never the same. Where several rows of a run are close, the nearest pairs of rows
    of ``told_by`` [n, ...] and [m, ...] meet, those of the arrays themselves by default; its common factor
    between the runs is of no account. What is equal there too is matched in order.
    """
    if a.shape[1:] != b.shape[1:]:
        return Matching(np.zeros(0, np.int64), np.zeros(0, np.int64), len(a), len(b))
    left, right = _flat(a), _flat(b)
    classes = _classes(np.concatenate([left, right]))
    of_a, of_b = _members(classes[: len(a)]), _members(classes[len(a) :])
    single = [(of_a[c][0], of_b[c][0]) for c in of_a if len(of_a[c]) == 1 and len(of_b.get(c, ())) == 1]
    several = [c for c in of_a if c in of_b and len(of_a[c]) + len(of_b[c]) > 2]
    tell_a, tell_b = left, right
    if told_by is not None:
        members = [(of_a[c], of_b[c]) for c in of_a if c in of_b]
        tell_a, tell_b = _in_one_scale(_flat(told_by[0]), _flat(told_by[1]), members)
    found = list(single)
    for c in several:
        x, y = np.array(of_a[c]), np.array(of_b[c])
        found += ((int(x[i]), int(y[j])) for i, j in _assigned(tell_a[x], tell_b[y]))
    rows = np.array(sorted(found), dtype=np.int64).reshape(-1, 2)
    return Matching(rows[:, 0], rows[:, 1], len(left) - len(rows), len(right) - len(rows))


def _flat(x: np.ndarray) -> np.ndarray:
    rows = x.reshape(len(x), math.prod(x.shape[1:]))  # an expert may be given nothing
    return np.ascontiguousarray(rows, dtype=np.float64)


def _members(classes: np.ndarray) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, label in enumerate(classes.tolist()):
        found.setdefault(label, []).append(number)
    return found


def _in_one_scale(a: np.ndarray, b: np.ndarray, classes: list[tuple[list[int], list[int]]]) -> Sides:
    """Return both with b's common factor taken away, which the sums over the rows of each class tell."""
    sums = [(a[x].sum(axis=0), b[y].sum(axis=0)) for x, y in classes if len(x) == len(y)]
    square, product = sum(float(x @ x) for x, _ in sums), sum(float(x @ y) for x, y in sums)
    return (a, b * (square / product)) if square and product and math.isfinite(product) else (a, b)


def _classes(rows: np.ndarray) -> np.ndarray:
    """Return for each row the number of its class: rows that are close, one to the next, are of one class."""
    where: dict[bytes, int] = {}
    same = np.array([where.setdefault(row.tobytes(), len(where)) for row in rows], dtype=np.int64)
    if not len(where):
        return same
    distinct = rows[np.unique(same, return_index=True)[1]]
    return _joined(distinct)[same]


def _joined(rows: np.ndarray) -> np.ndarray:
    """Return the class of each of some distinct rows. Those apart in a few directions get no further look."""
    size = np.linalg.norm(rows, axis=1)
    directions = np.random.default_rng(0).normal(size=(rows.shape[1], 4))
    directions /= np.linalg.norm(directions, axis=0) + (directions.size == 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        looks = np.where(size[:, None] > 0, rows / size[:, None], 0.0) @ directions
    order = np.argsort(looks[:, 0], kind="stable")
    looks, classes = looks[order], np.arange(len(rows))
    for step in range(1, len(rows)):
        if not (looks[step:, 0] - looks[:-step, 0] <= 2 * CLOSE).any():
            break
        at = np.flatnonzero(classes[order[step:]] != classes[order[:-step]])
        at = at[(np.abs(looks[at + step] - looks[at]) <= 2 * CLOSE).all(axis=1)]
        for x, y in zip(order[at], order[at + step], strict=True):
            if np.linalg.norm(rows[x] - rows[y]) <= CLOSE * max(size[x], size[y]):
                classes[classes == classes[y]] = classes[x]
    return classes


def _assigned(a: np.ndarray, b: np.ndarray) -> list[tuple[int, int]]:
    """Return pairs of rows, as many as there are on the smaller side: the nearest first."""
    waiting: dict[bytes, list[int]] = {}
    for number in range(len(b) - 1, -1, -1):
        waiting.setdefault(b[number].tobytes(), []).append(number)
    found = [(n, held.pop()) for n in range(len(a)) if (held := waiting.get(a[n].tobytes()))]
    for _ in range(_ROUNDS):
        left = np.setdiff1d(np.arange(len(a)), [x for x, _ in found])
        right = np.setdiff1d(np.arange(len(b)), [y for _, y in found])
        if not len(left) or not len(right):
            return found
        near_a, near_b = _nearest(a[left], b[right])
        found += zip(left[near_a].tolist(), right[near_b].tolist(), strict=True)
    left = np.setdiff1d(np.arange(len(a)), [x for x, _ in found])
    right = np.setdiff1d(np.arange(len(b)), [y for _, y in found])
    return [*found, *zip(left.tolist(), right.tolist(), strict=False)]


def _nearest(a: np.ndarray, b: np.ndarray) -> Sides:
    """Return the rows that are each other's nearest."""
    best_b, best_a = np.zeros(len(a), np.int64), np.zeros(len(b), np.int64)
    least_a = np.full(len(b), np.inf)
    for start in range(0, len(a), BLOCK):
        block = a[start : start + BLOCK]
        distance = _distances(block, b)
        best_b[start : start + BLOCK] = distance.argmin(axis=1)
        nearest = distance.argmin(axis=0)
        value = distance[nearest, np.arange(len(b))]
        closer = value < least_a
        best_a[closer], least_a[closer] = nearest[closer] + start, value[closer]
    rows = np.flatnonzero(best_a[best_b] == np.arange(len(a)))
    return rows, best_b[rows]


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return all squared distances. Of rows that are nearly the same they are taken about their mean."""
    middle = b.mean(axis=0)
    x, y = a - middle, b - middle
    return np.asarray(np.sum(x * x, axis=1)[:, None] + np.sum(y * y, axis=1)[None] - 2 * x @ y.T)
