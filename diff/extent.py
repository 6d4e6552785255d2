"""The sizes of one part's batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tensortrace.diff.masks import tokens_of


class Extent(NamedTuple):
    """Sizes of one part's batch: rows and padded positions; positions is None where there are none.

    ``time_major``: the first dimension of the batch are the positions, the second the rows. ``packed``: some
    row holds several documents. ``answers`` is the padded length of a second sequence of each row, if any.
    """

    rows: int
    positions: int | None
    time_major: bool = False
    packed: bool = False
    answers: int | None = None

    def of_answers(self) -> Extent:
        """Return the sizes of the second sequences; the first are then the others."""
        return self._replace(positions=self.answers, answers=self.positions)

    def one_fewer(self) -> Extent:
        """Return the sizes of tensors that lack the last position."""
        return self._replace(positions=self.positions - 1 if self.positions else None)

    def by_row(self, flat: np.ndarray) -> np.ndarray:
        """Return a tensor of one or several entries per token, flattened, as [rows, entries]."""
        if self.time_major:
            return np.ascontiguousarray(flat.reshape(-1, self.rows).T)
        return flat.reshape(self.rows, -1)


def extent_of(tensors: dict[str, np.ndarray]) -> Extent:
    """Return the sizes of what a root was given; rows come first."""
    tokens = tokens_of(tensors)
    if tokens is not None:
        return Extent(tokens.shape[0], tokens.shape[1])
    first = next(iter(tensors.values()))
    return Extent(first.shape[0], None)
