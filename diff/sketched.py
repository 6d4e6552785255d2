"""Reads a logical tensor, or what stands for one whose values were not stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from tensortrace.diff.estimate import Estimate, as_array
from tensortrace.diff.logical import MADE_OF_UNSTORED, Merged, Source, Unkept
from tensortrace.tracer.errors import NotKept
from tensortrace.tracer.geometry import Region, full_region
from tensortrace.tracer.identities import Follows
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.sketch_record import decode_numbers
from tensortrace.tracer.sketching import numbers_of
from tensortrace.tracer.types import Entry

_SUMS = frozenset({"sum", "avg", "mean", "premul_sum"})


def sketched(source: Source, entry: Entry) -> Estimate | None:
    """Return the estimate that stands for a tensor; None where its values are there, or no sketch is."""
    if isinstance(source, Merged):
        return _merged(source, entry)
    if entry.sketch is None or source.stored(entry):
        return None
    return _estimate(decode_numbers(entry.sketch), entry, entry.sketch.rows)


def whole(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the sketch of a global tensor whose indices are none of samples."""
    return of_region(array, full_region(array.shape), size)


def read_known(source: Source, entry: Entry) -> np.ndarray:
    """Return a tensor, checked against its digest; an estimate where only a sketch was stored.

    Raises Unkept where neither was, and as the source's own ``read`` does.
    """
    if (known := sketched(source, entry)) is not None:
        return as_array(known)
    try:
        return source.read(entry)
    except NotKept as error:
        raise Unkept(MADE_OF_UNSTORED) from error


def known_blocks(source: Source, entry: Entry, most: int, only: int | None = None) -> Iterator[np.ndarray]:
    """Yield a tensor in blocks of at most ``most`` elements, or one alone; an estimate is one block."""
    if (known := sketched(source, entry)) is not None:
        yield as_array(known)
        return
    try:
        yield from source.blocks(entry, most, only)
    except NotKept as error:
        raise Unkept(MADE_OF_UNSTORED) from error


def known_through(source: Source, entry: Entry, most: int) -> Iterator[np.ndarray]:
    """Yield what ``known_blocks`` does, for who goes through all of it before any result is used.

    Then a tensor's digest needs no pass of its own: the last step raises where it is another.
    """
    if not isinstance(source, RankTrace) or sketched(source, entry) is not None:
        yield from known_blocks(source, entry, most)
        return
    try:
        yield from source.through(entry, most)
    except NotKept as error:
        raise Unkept(MADE_OF_UNSTORED) from error


def is_bare(source: Source, entry: Entry) -> bool:
    """Tell whether the values of a tensor, or of a part of it, were never stored, by no rank."""
    parts: list[tuple[Source, Entry]] = [(source, entry)]
    if isinstance(source, Merged):
        parts = [(member.source, member.entry) for member in source.chosen]
    return any(e.blob is None and e.same_as is None and not held.stored(e) for held, e in parts)


def _estimate(numbers: np.ndarray, entry: Entry, rows: int | None) -> Estimate:
    first, second = numbers.shape
    norm = entry.stats.l2 if entry.stats else None
    of = None if rows is not None else partial(whole, size=(first, second))
    return Estimate(numbers, entry.local_shape, norm, of)


def _merged(source: Merged, entry: Entry) -> Estimate | None:
    """Return the sum of the sketches of a tensor's parts; a part that was stored is sketched at its place."""
    members = {member.rank: member for member in source.chosen}
    if source.problem or all(m.source.stored(m.entry) for m in members.values()):
        return None
    known = [m.entry.sketch for m in members.values() if m.entry.sketch is not None]
    kinds = {(sketch.size, sketch.rows, sketch.positions) for sketch in known}
    if len(kinds) != 1:
        return None
    ((size, rows, _),) = kinds
    total = np.zeros(size)
    for part in source.parts:
        member = members[part.rank]
        if not _SUMS.issuperset(part.ops):
            return None
        if member.source.stored(member.entry):
            if rows is not None:
                return None
            numbers = of_region(member.source.read(member.entry), part.region, size)
        elif member.entry.sketch is None:
            return None
        else:
            numbers = decode_numbers(member.entry.sketch)
        count = math.prod(
            n for n, op in zip(part.partial_shape, part.ops, strict=True) if op in ("avg", "mean")
        )
        total += numbers / count
    return _estimate(total, entry, rows)


def of_region(
    array: np.ndarray, region: Region, size: tuple[int, int], follows: Follows | None = None
) -> np.ndarray:
    """Return the sketch of a part of a global tensor in memory, which may follow samples."""
    flat = np.ravel(array)
    return numbers_of(lambda start, stop: flat[start:stop], region, array.shape, follows, size)
