"""Which samples a pass works on: a number for each row of what its root module was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of
from tensortrace.tracer.types import Boundary, Kind

_PASSES = 1024
"""Passes of a step that are remembered; a step has rarely more than a few microbatches."""

WITH_ROWS = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRAD})
"""Kinds whose tensors may follow the samples of their pass."""


class Samples(NamedTuple):
    """The samples of one pass: identities (uint64), and the positions of each where it has any."""

    identities: NDArray[np.uint64]
    positions: int | None


class Follows(NamedTuple):
    """The dimension of a tensor that follows the samples; ``positions`` where it holds so many of each."""

    samples: Samples
    dim: int
    positions: int | None = None


@dataclass
class _Pass:
    """What is known of one pass: the first input with dimensions, and the first integer matrix."""

    name: str
    events: dict[tuple[str, int], str] = field(default_factory=dict)
    first: Samples | None = None
    tokens: Samples | None = None
    known: bool = True
    begun: bool = False

    @property
    def samples(self) -> Samples | None:
        return (self.tokens or self.first) if self.known else None


class Identities:
    """Follows the boundaries of one rank in order, and tells the samples of each pass."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._passes: dict[int | None, _Pass] = {}

    def see(self, boundary: Boundary, data: Bytes, *, whole: bool) -> None:
        """Take note of a boundary; ``whole`` tells whether the rank holds all of its tensor."""
        if boundary.step != self._step or len(self._passes) > _PASSES:
            self._step = boundary.step
            self._passes.clear()
        found = self._passes.get(boundary.microbatch)
        if boundary.kind != Kind.INPUT:
            if found is not None and boundary.kind == Kind.ACTIVATION:
                found.begun = True
            return
        again = boundary.microbatch is None and found is not None and found.begun
        if found is None or again:  # each pass without gradients begins anew
            found = self._passes[boundary.microbatch] = _Pass(boundary.name)
        if boundary.local_shape and not boundary.recompute:
            _take(found, boundary, data, whole=whole)

    def samples(self, boundary: Boundary) -> Samples | None:
        """Return the samples of a boundary's pass, as far as they are known."""
        found = self._passes.get(boundary.microbatch) if boundary.step == self._step else None
        return found.samples if found is not None else None

    def follows(self, boundary: Boundary, shape: tuple[int, ...]) -> Follows | None:
        """Return the dimension of a tensor of this global shape that follows the samples, if any does."""
        samples = self.samples(boundary)
        if samples is None or boundary.kind not in WITH_ROWS or not shape:
            return None
        rows = len(samples.identities)
        if shape[0] == rows:
            return Follows(samples, 0)
        if len(shape) > 2 and shape[:2] == (samples.positions, rows):  # also of one sample
            return Follows(samples, 1)
        if samples.positions is not None and shape[0] == rows * samples.positions:
            return Follows(samples, 0, samples.positions)
        if len(shape) > 1 and shape[1] == rows:
            return Follows(samples, 1)
        return None


def _take(found: _Pass, boundary: Boundary, data: Bytes, *, whole: bool) -> None:
    """Note an input of a pass; inputs of two roots, or of two calls of one, leave its samples unknown."""
    family = dtype_of(boundary.dtype).family
    is_matrix = family == "int" and len(boundary.local_shape) == 2
    found.known &= boundary.name == found.name and boundary.call == 0
    if found.tokens is not None or (found.first is not None and not is_matrix):
        return
    if not whole:
        found.known = False
        return
    samples = Samples(_identities(boundary, data), boundary.local_shape[1] if is_matrix else None)
    if is_matrix:
        found.tokens = samples
    else:
        found.first = samples


def _identities(boundary: Boundary, data: Bytes) -> NDArray[np.uint64]:
    """Return xxh3-64 of each row; integers are hashed as int64."""
    rows = boundary.local_shape[0]
    if dtype_of(boundary.dtype).family == "int":
        data = data.view(dtype_of(boundary.dtype).storage).astype("<i8").view("u1")
    each = data.reshape(rows, data.size // rows if rows else 0)
    return np.array([xxhash.xxh3_64_intdigest(np.ascontiguousarray(row).data) for row in each], np.uint64)
