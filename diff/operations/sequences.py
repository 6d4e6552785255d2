"""Which operation of one run is which of the other: an inserted one does not shift the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.operations.calls import RETURN, Operation

MAX_CELLS = 4_000_000
"""Pairs that are weighed; longer sequences are matched from both ends only."""

Pairs = list[tuple[int, int]]

_SAME_NAME, _SAME_FUNCTION, _SAME_MODULE, _SAME_LINE, _SAME_FORM, _SAME_VALUE = 8, 3, 2, 1, 2, 4


def align(a: Sequence[Operation], b: Sequence[Operation]) -> Pairs:
    """Return pairs of indices, rising in both: the matching of greatest weight.

    Operations of one name match anywhere; those of two names only where function and form of the result are
    the same (``sub`` in the place of ``add``), and only if that costs no better match.
    """
    if len(a) == len(b) and all(map(_alike, a, b)):
        return [(i, i) for i in range(len(a))]
    fits = _alike if len(a) * len(b) > MAX_CELLS else _equal
    head = 0
    while head < min(len(a), len(b)) and fits(a[head], b[head]):
        head += 1
    tail = 0
    while tail < min(len(a), len(b)) - head and fits(a[-1 - tail], b[-1 - tail]):
        tail += 1
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    pairs = [(i, i) for i in range(head)]
    pairs += [(i + head, j + head) for i, j in _heaviest(middle_a, middle_b)]
    return pairs + [(len(a) - tail + i, len(b) - tail + i) for i in range(tail)]


def _equal(a: Operation, b: Operation) -> bool:
    """Tell whether two operations are the same, values included: no better match can be."""
    return _alike(a, b) and _values(a, "a") == _values(b, "b")


def _alike(a: Operation, b: Operation) -> bool:
    """Tell whether two operations are the same in everything but values."""
    return (
        a.packet == b.packet
        and (a.function, a.module, _form(a)) == (b.function, b.module, _form(b))
        and [g.shape for g in a.given] == [g.shape for g in b.given]
    )


def _heaviest(a: Sequence[Operation], b: Sequence[Operation]) -> Pairs:
    if not a or not b or len(a) * len(b) > MAX_CELLS:
        return []
    weights = _weights(a, b)
    best = np.zeros((len(a) + 1, len(b) + 1), dtype=np.int64)
    for i in range(len(a) - 1, -1, -1):
        row = np.maximum(best[i + 1, :-1], np.where(weights[i] > 0, weights[i] + best[i + 1, 1:], 0))
        best[i, :-1] = np.maximum.accumulate(row[::-1])[::-1]  # what is left out of b costs nothing
    pairs: Pairs = []
    i = j = 0
    while i < len(a) and j < len(b):
        if weights[i, j] > 0 and best[i, j] == weights[i, j] + best[i + 1, j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i, j] == best[i, j + 1]:
            j += 1
        else:
            i += 1
    return pairs


def _weights(a: Sequence[Operation], b: Sequence[Operation]) -> np.ndarray:
    """Return how well each of a fits each of b, 0 where they cannot be the same."""

    def same(values_a: list[object], values_b: list[object]) -> np.ndarray:
        numbers: dict[object, int] = {}
        left, right = (
            np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
            for values in (values_a, values_b)
        )
        equal: np.ndarray = left[:, None] == right[None, :]
        return equal

    name = same([op.packet for op in a], [op.packet for op in b])
    function = same([op.function for op in a], [op.function for op in b])
    module = same([op.module for op in a], [op.module for op in b])
    line = same([op.source for op in a], [op.source for op in b])
    form = same([_form(op) for op in a], [_form(op) for op in b])
    replaced = ~name & function & module & form
    for side, axis in ((a, 0), (b, 1)):
        ends = np.array([op.packet == RETURN or not op.outputs for op in side])
        replaced &= ~(ends[:, None] if axis == 0 else ends[None, :])
    value = same([_values(op, "a") for op in a], [_values(op, "b") for op in b])
    near = (
        _SAME_VALUE * value
        + _SAME_FUNCTION * function
        + _SAME_MODULE * module
        + _SAME_LINE * line
        + _SAME_FORM * form
    )
    weights: np.ndarray = np.where(name, _SAME_NAME + near, np.where(replaced, 1, 0))
    return weights


def _values(operation: Operation, side: str) -> object:
    """Return what tells results of equal bytes; what has none is like nothing of the other side."""
    return tuple(entry.digest for entry in operation.outputs.values()) or (side, operation.number)


def _form(operation: Operation) -> object:
    """Return what results look like whatever the layout: how many dimensions, and whether of a float."""
    return tuple(len(entry.local_shape) for entry in operation.outputs.values())
