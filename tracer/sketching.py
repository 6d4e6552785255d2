"""Makes sketches of what a rank holds: by its place in the global tensor, and by which sample is which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, values
from tensortrace.tracer.geometry import LayoutError, Region, full_region, region
from tensortrace.tracer.identities import WITH_ROWS, Follows, Identities
from tensortrace.tracer.sketch import Grid, Numbers, Read, Side, whole_sides, words
from tensortrace.tracer.sketch_record import encode_numbers
from tensortrace.tracer.types import Boundary, Kind, Mesh, Shard, Sketch

_REMEMBERED, _PLACES, _GRIDS = 1 << 16, 1 << 12, 24
"""Sketches, places, and signs of places that are remembered; signs may take 2 MiB each."""


class _Place(NamedTuple):
    """What a sketch depends on beside a tensor's content."""

    region: Region
    size: tuple[int, int]
    rows: int | None
    positions: int | None
    samples: int


class Placed(NamedTuple):
    """Where a boundary's tensor lies, as its sketch depends on it; ``name`` is one of equal places."""

    name: str
    part: Region
    follows: Follows | None
    place: _Place


class _Unknown:
    """Stands for a place that was not looked for yet."""


_UNKNOWN = _Unknown()


class Sketcher:
    """Sees every boundary of one rank in order; used by one thread at a time, but for ``know``.

    Equal content at the same place has one sketch: it is made once, and later boundaries refer to it.
    """

    def __init__(self) -> None:
        self._meshes: Mapping[str, Mesh] = {}
        self._identities = Identities()
        self._grids: dict[tuple[_Place, tuple[int, ...]], Grid] = {}
        self._made: OrderedDict[str, int] = OrderedDict()
        self._placed: dict[Hashable, Placed | None] = {}
        self._regions = lru_cache(maxsize=4096)(self._region)

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Take note of the meshes that shards refer to."""
        if meshes != self._meshes:
            self._meshes = meshes
            self._regions.cache_clear()
            self._placed.clear()

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
        placed = self.place(boundary, size)
        if placed is None:
            return None
        if (event := self.made(digest, placed.name)) is not None:
            return event
        found = self.make(boundary, data, placed)
        if found is not None:
            self.remember(digest, placed.name, boundary.event)
        return found

    def place(self, boundary: Boundary, size: tuple[int, int]) -> Placed | None:
        """Return the place that a boundary's sketch depends on; None where its shard makes no sense."""
        samples = self._identities.samples(boundary) if boundary.kind in WITH_ROWS else None
        who = 0 if samples is None else xxhash.xxh3_64_intdigest(samples.identities.data)
        key = boundary.shard, boundary.local_shape, size, who, samples and samples.positions, samples is None
        found = self._placed.get(key, _UNKNOWN)
        if isinstance(found, _Unknown):
            if len(self._placed) >= _PLACES:
                self._placed.clear()
            found = self._placed[key] = self._place(boundary, size)
        return found  # what was put there may be gone by now: another thread may have told of a mesh

    def make(self, boundary: Boundary, data: Bytes, placed: Placed) -> Sketch | None:
        """Return the sketch of a content at its place; None where sums of its elements are beyond float64."""
        numbers = self._numbers(boundary, data, placed)
        if not np.isfinite(numbers).all():
            return None
        follows = placed.follows
        dim, positions = (None, None) if follows is None else (follows.dim, follows.positions)
        return encode_numbers(numbers, dtype=boundary.dtype, rows=dim, positions=positions)

    def made(self, digest: str, name: str) -> int | None:
        """Return the event of the boundary that has the sketch of a content at a place."""
        key = digest + name
        if (event := self._made.get(key)) is not None:
            self._made.move_to_end(key)  # now the latest
        return event

    def remember(self, digest: str, name: str, event: int) -> None:
        """Take note of the boundary that has the sketch of a content at a place."""
        self._made[digest + name] = event
        self._made.move_to_end(digest + name)
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)  # the oldest

    def _place(self, boundary: Boundary, size: tuple[int, int]) -> Placed | None:
        part = self._regions(boundary.shard, boundary.local_shape)
        if part is None:
            return None
        follows = None if part.flat else self._identities.follows(boundary, part.global_shape)
        place = _place(part, size, follows)
        return Placed(xxhash.xxh3_128_hexdigest(repr(place).encode()), part, follows, place)

    def _numbers(self, boundary: Boundary, data: Bytes, placed: Placed) -> Numbers:
        itemsize, part, follows = dtype_of(boundary.dtype).itemsize, placed.part, placed.follows

        def read(start: int, stop: int) -> np.ndarray:
            return values(boundary.dtype, data[start * itemsize : stop * itemsize])

        key = placed.place, boundary.local_shape
        grid = self._grids.pop(key, None)
        if grid is None:
            grid = Grid(_sides(part, boundary.local_shape, follows), placed.place.size)
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
