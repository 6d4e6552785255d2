"""By how much an operation passes on an error of one of its inputs, as far as recorded sizes tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.causality import Node
from tensortrace.tracer.types import Kind

MOST = 64.0
"""Amplification beyond which sizes are not believed: a boundary would be blind."""


@dataclass(frozen=True)
class Reach:
    """A boundary of norm ``size``, and one of what it was computed from, of norm ``given``.

    ``result`` is the shape of what the operation returns: of the boundary, or where that is a gradient of the
    values beside it.
    """

    node: Node
    parent: Node
    result: tuple[int, ...]
    given_shape: tuple[int, ...]
    size: float
    given: float

    def factor(self, centred: float) -> float:
        """Return what the relative error of the input is multiplied by before it may be amplified.

        ``centred`` is what of the input's norm is left without the mean of each row: a normalisation takes
        that mean away, and what is left has the whole error.
        """
        if self._is_added:
            return self._of_addition()
        if self.parent.slot.kind == Kind.ACTIVATION and self.node.slot.kind == Kind.ACTIVATION:
            return min(1.0 / centred, MOST) if centred > 0 and self._same_module else 1.0
        return 1.0

    @property
    def _same_module(self) -> bool:
        return self.node.slot.name == self.parent.slot.name

    @property
    def _is_added(self) -> bool:
        """Tell whether the input is a bias: it is added to each row, and no gradient reads it."""
        passes = (Kind.ACTIVATION, Kind.ACTIVATION_GRAD)
        bias = self.parent.slot.kind == Kind.PARAM and self.parent.slot.name.endswith("bias")
        added = len(self.given_shape) == 1 and self.given_shape[0] in self.result
        return bias and added and self.node.slot.kind in passes

    def _of_addition(self) -> float:
        """Return how large all copies of a bias are beside the result, often nearly nothing."""
        if self.node.slot.kind == Kind.ACTIVATION_GRAD:
            return 0.0
        copies = math.prod(self.result) / max(self.given_shape[0], 1)
        return min(1.0, self.given * math.sqrt(copies) / self.size) if self.size else 1.0


RANKS = 64
"""Contributions that a gradient may sum after it left its rank; more are added in a tree."""


def terms_in_sum(node: Node, given: Sequence[tuple[int, ...]]) -> int:
    """Return how many terms an element sums at most, from the shapes of what it was computed from.

    A result sums over features or positions, not over the samples of the first dimension; a local gradient
    and a loss over all but the last; a total norm over everything.
    """
    kind = node.slot.kind
    if kind == Kind.CLIPPED_GRAD and node.slot.slot in ("total_norm", "coefficient"):
        return max(sum(math.prod(shape) for shape in given), 1)
    if kind in (Kind.LOCAL_GRAD, Kind.LOSS):
        return max((math.prod(shape[:-1]) for shape in given), default=1)
    if kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD):
        return max((max(shape[1:], default=1) for shape in given), default=1)
    return RANKS


_CACHED = 1 << 16
"""Elements that are looked at at a time."""

_TOLD = 1e-4
"""Share of a sum of squares from which on a difference of two such sums has digits enough."""


def centred(values: np.ndarray) -> float:
    """Return which part of a tensor's norm is left without the mean of each row."""
    if values.ndim < 2 or values.dtype.kind not in "f":
        return 1.0
    squares = of_means = 0.0
    rows = values.reshape(-1, values.shape[-1])
    many = max(_CACHED // max(values.shape[-1], 1), 1)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(rows), many):
            wide = rows[start : start + many].astype(np.float64)
            squares += float(np.vdot(wide, wide))
            means = wide @ np.full(wide.shape[1], 1 / max(wide.shape[1], 1))
            of_means += float(means @ means) * wide.shape[1]
        if not squares or not math.isfinite(squares) or not math.isfinite(of_means):
            return 1.0
        if squares - of_means > _TOLD * squares:
            return math.sqrt((squares - of_means) / squares)
        wide = values.astype(np.float64)  # nearly constant rows: the difference of sums has no digits left
        norm = float(np.linalg.norm(wide))
        left = float(np.linalg.norm(wide - wide.mean(axis=-1, keepdims=True)))
    return left / norm if norm and math.isfinite(left) and math.isfinite(norm) else 1.0
