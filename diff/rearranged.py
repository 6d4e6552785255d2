"""Stands in the place of who holds a tensor, and gives what is made of it, in one block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.logical import Source
from tensortrace.tracer.types import Entry


@dataclass(frozen=True)
class Rearranged(ABC):
    """Gives the tensor of ``entry`` in another arrangement; an item's own entry has that one's shape."""

    source: Source
    entry: Entry

    @property
    def rank(self) -> int:
        """The global rank, the lowest of several."""
        return self.source.rank

    def stored(self, entry: Entry) -> bool:
        """Tell whether the tensor's bytes are there."""
        return self.source.stored(self.entry)

    @abstractmethod
    def read(self, entry: Entry) -> np.ndarray:
        """Return the tensor in its new arrangement."""

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the tensor as one block."""
        if not only:
            yield self.read(entry)
