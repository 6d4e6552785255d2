"""Makes sketches of what a rank holds: by its place in the global tensor, and by which sample is which."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, values
from tensortrace.tracer.geometry import LayoutError, Region, full_region, region
from tensortrace.tracer.identities import Follows, Identities
from tensortrace.tracer.sketch import Grid, Numbers, Read, Side, whole_sides, words
from tensortrace.tracer.sketch_record import encode_numbers
from tensortrace.tracer.types import Boundary, Kind, Mesh, Shard, Sketch

_REMEMBERED, _GRIDS = 1 << 16, 24
"""Sketches, and signs of places, that are remembered; signs may take 1 MiB each."""


class _Place(NamedTuple):
    """What a sketch depends on beside a tensor's content."""

    region: Region
    size: tuple[int, int]
    rows: int | None
    positions: int | None
    samples: int


class Sketcher:
    """Sees every boundary of one rank in order; used by its writer thread.

    Equal content at the same place has one sketch: it is made once, and later boundaries refer to it.
    """

    def __init__(self) -> None:
        self._meshes: Mapping[str, Mesh] = {}
        self._identities = Identities()
        self._grids: dict[tuple[_Place, tuple[int, ...]], Grid] = {}
        self._made: dict[tuple[str, _Place], int] = {}
        self._regions = lru_cache(maxsize=4096)(self._region)

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Take note of the meshes that shards refer to."""
        if meshes != self._meshes:
            self._meshes = meshes
            self._regions.cache_clear()

    def forget(self) -> None:
        """Make the sketch of content that was seen before anew."""
        self._made.clear()

    def see(self, boundary: Boundary, data: Bytes) -> None:
        """Take note of a boundary, whatever is kept of it: inputs tell the samples of what follows."""
        whole = True
        if boundary.kind == Kind.INPUT:
            found = self._regions(boundary.shard, boundary.local_shape)
            whole = found is not None and found.whole and not found.flat
        self._identities.see(boundary, data, whole=whole)

    def sketch(
        self, boundary: Boundary, data: Bytes, digest: str, size: tuple[int, int]
    ) -> Sketch | int | None:
        """Return the sketch, or the event of the boundary that has it; None where the tensor has none.

        It has none where its shard makes no sense, and where sums of its elements are beyond float64.
        """
        part = self._regions(boundary.shard, boundary.local_shape)
        if part is None:
            return None
        follows = None if part.flat else self._identities.follows(boundary, part.global_shape)
        place = _place(part, size, follows)
        key = digest, place
        if (event := self._made.get(key)) is not None:
            return event
        numbers = self._numbers(boundary, data, part, follows, place)
        if not np.isfinite(numbers).all():
            return None
        if len(self._made) >= _REMEMBERED:
            del self._made[next(iter(self._made))]  # the oldest
        self._made[key] = boundary.event
        dim, positions = (None, None) if follows is None else (follows.dim, follows.positions)
        return encode_numbers(numbers, dtype=boundary.dtype, rows=dim, positions=positions)

    def _numbers(
        self, boundary: Boundary, data: Bytes, part: Region, follows: Follows | None, place: _Place
    ) -> Numbers:
        itemsize = dtype_of(boundary.dtype).itemsize

        def read(start: int, stop: int) -> np.ndarray:
            return values(boundary.dtype, data[start * itemsize : stop * itemsize])

        key = place, boundary.local_shape
        grid = self._grids.pop(key, None)
        if grid is None:
            grid = Grid(_sides(part, boundary.local_shape, follows), place.size)
            if len(self._grids) >= _GRIDS:
                del self._grids[next(iter(self._grids))]
        self._grids[key] = grid  # now the latest
        return grid.flat(read, part.dims[0]) if _is_flat(part, follows) else grid.product(read)

    def _region(self, shard: Shard | None, shape: tuple[int, ...]) -> Region | None:
        if shard is None:
            return full_region(shape)
        mesh = self._meshes.get(shard.mesh)
        try:
            return None if mesh is None else region(shard, mesh, shape)
        except LayoutError:
            return None


def _place(part: Region, size: tuple[int, int], follows: Follows | None) -> _Place:
    if follows is None:
        return _Place(part, size, None, None, 0)
    samples = xxhash.xxh3_64_intdigest(follows.samples.identities.data)
    return _Place(part, size, follows.dim, follows.positions, samples)


def numbers_of(
    read: Read, part: Region, local_shape: tuple[int, ...], follows: Follows | None, size: tuple[int, int]
) -> Numbers:
    """Return the sketch of what a rank holds: ``part`` of a global tensor, which may follow samples."""
    grid = Grid(_sides(part, local_shape, follows), size)
    return grid.flat(read, part.dims[0]) if _is_flat(part, follows) else grid.product(read)


def _sides(part: Region, local_shape: tuple[int, ...], follows: Follows | None) -> list[Side]:
    """Return the logical dimensions of a local tensor, or of the whole one that it is intervals of.

    In a product those of samples and their positions are one.
    """
    if _is_flat(part, follows):
        return list(whole_sides(part.global_shape) if follows is None else _sides_of_samples(follows))
    if not part.size:  # of whatever shape without elements
        return [Side(words(0, np.arange(0)), 0)]
    sides: list[Side] = []
    number = 0
    for dim, intervals in enumerate(part.dims):
        indices = np.concatenate([np.arange(start, stop) for start, stop in intervals])
        found = words(number, indices)
        if follows is not None and follows.dim == dim:
            samples = follows.samples.identities
            if follows.positions is None:
                found = words(number, samples[indices])
            else:
                sample, position = np.divmod(indices, follows.positions)
                found = words(number, samples[sample]) ^ words(number + 1, position)
                number += 1
        sides.append(Side(found, local_shape[dim]))
        number += 1
    if len(sides) == 1:
        sides.append(Side(words(1, np.arange(1)), 1))
    return sides


def _is_flat(part: Region, follows: Follows | None) -> bool:
    """Tell whether a local tensor of one dimension is one of several logical ones, flattened."""
    by_position = follows is not None and follows.positions is not None
    return part.flat or (len(part.dims) == 1 and (follows is None or by_position))


def _sides_of_samples(follows: Follows) -> tuple[Side, ...]:
    """Return the logical dimensions of a tensor that holds one element per position."""
    assert follows.positions is not None
    identities = follows.samples.identities
    return (
        Side(words(0, identities), len(identities)),
        Side(words(1, np.arange(follows.positions)), follows.positions),
    )
