"""Gradients that overflowed under a loss scale, where both runs left the update out because of it.

A loss scale is raised until gradients overflow: that is how it is found, and such a step changes nothing.
Which elements overflow depends on the factors that legal programs put in different places (a local loss
times the number of ranks, say), so only what is finite in both runs is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import StepView
from tensortrace.diff.stream import Readable, Streamed
from tensortrace.tracer.types import Kind


def both_skipped(a: StepView, b: StepView) -> bool:
    """Tell whether an update was skipped, by the same optimizers on all ranks of both runs."""
    left, right = _skips(a), _skips(b)
    return left == right and {True} in left.values() and {True, False} not in left.values()


def _skips(view: StepView) -> dict[tuple[str, int], set[bool]]:
    return {
        (slot.name, slot.call): {bool(item.read()) for item in items}
        for slot, items in view.find(Kind.SCHEDULE)
        if slot.slot == "skipped"
    }


@dataclass(frozen=True)
class _Finite:
    """One side of two, with zeros where either side is not finite."""

    mine: Readable
    other: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both sides."""
        return self.mine.shape

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans."""
        return self.mine.exact

    def read(self) -> np.ndarray:
        """Return the whole."""
        return _zeroed(self.mine.read(), self.other.read())

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the blocks in row-major order, or one block alone."""
        for own, other in zip(self.mine.blocks(only), self.other.blocks(only), strict=True):
            yield _zeroed(own, other)


def where_finite(loaded: Assembled | Streamed) -> Assembled | Streamed:
    """Return both sides with zeros where either is not finite."""
    if isinstance(loaded, Assembled):
        return loaded._replace(a=_zeroed(loaded.a, loaded.b), b=_zeroed(loaded.b, loaded.a))
    return Streamed(_Finite(loaded.a, loaded.b), _Finite(loaded.b, loaded.a))


def _zeroed(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    finite = np.isfinite(own) & np.isfinite(other)
    return own if finite.all() else np.where(finite, own, np.zeros((), own.dtype))
