"""Reads a logical tensor, or what stands for one whose values were not stored."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortrace.diff.estimate import Estimate, as_array
from tensortrace.diff.logical import MADE_OF_UNSTORED, Merged, Source, Unkept
from tensortrace.tracer.errors import NotKept
from tensortrace.tracer.types import Entry


def sketched(source: Source, entry: Entry) -> Estimate | None:
    """Return the estimate that stands for a tensor; None where its values are there, or no sketch is."""
    return None


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


def is_bare(source: Source, entry: Entry) -> bool:
    """Tell whether the values of a tensor, or of a part of it, were never stored, by no rank."""
    parts: list[tuple[Source, Entry]] = [(source, entry)]
    if isinstance(source, Merged):
        parts = [(member.source, member.entry) for member in source.chosen]
    return any(e.blob is None and e.same_as is None and not held.stored(e) for held, e in parts)
