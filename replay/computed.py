"""Items that were not recorded but computed: what a contract gives, in the place of what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.diff.catalog import Item
from tensortrace.diff.logical import Member, RankSource, Together
from tensortrace.diff.stream import block_size
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.types import Entry

Blocks = Callable[[], Iterable[np.ndarray]]
"""Computes a tensor in blocks of the grid of its shape, or as one."""


@dataclass(frozen=True)
class Computed(Together):
    """Holds no tensor: computes it each time that it is asked for."""

    make: Blocks

    def stored(self, entry: Entry) -> bool:
        """Return true: it can be had at any time."""
        return True

    def read(self, entry: Entry) -> np.ndarray:
        """Return the whole."""
        parts = list(self.make())
        if not parts:
            return np.zeros(entry.local_shape)  # it has no elements
        if len(parts) == 1:
            return parts[0].reshape(entry.local_shape)
        whole = np.empty(entry.local_shape, parts[0].dtype)
        for (offset, shape), part in zip(_grid(entry.local_shape), parts, strict=True):
            whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = part.reshape(shape)
        return whole

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield it block by block, or one block alone."""
        for number, part in enumerate(self.make()):
            if only is None or only == number:
                yield part


def _grid(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    return block_grid(shape, block_size(shape))


def computed(actual: Item, make: Blocks, *, dtype: str = "float64") -> Item:
    """Return what a contract gives in the place of a recorded tensor, of its shape."""
    digest = xxhash.xxh3_128_hexdigest(f"computed {actual.entry.digest}".encode())
    entry = replace(
        actual.entry, dtype=dtype, digest=digest, shard=None, blob=None, same_as=None, sketch=None, stats=None
    )
    source = Computed(tuple(_members(actual)), make)
    return Item(source, entry, actual.part, actual.call, actual.cell)


def number_of(actual: Item, value: float, *, dtype: str = "float64") -> Item:
    """Return a number that a contract gives in the place of a recorded one."""
    kind = np.int64 if dtype == "int64" else np.float64
    return computed(actual, lambda: [np.full(actual.entry.local_shape, value, dtype=kind)], dtype=dtype)


def same_as(actual: Item, given: Item) -> Item:
    """Return a recorded tensor as what another one has to be."""
    return Item(given.source, given.entry, actual.part, actual.call, actual.cell)


def _members(item: Item) -> Iterator[Member]:
    source = item.source
    if isinstance(source, Together):
        yield from source.members
    else:
        rank_source: RankSource = source  # type: ignore[assignment]  # one rank, which reads ranges
        yield Member(rank_source, item.entry)
