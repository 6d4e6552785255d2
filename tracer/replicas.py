"""Which copies of a tensor are stored: of ranks that declare equal copies, the first one's alone."""

from __future__ import annotations

from tensortrace.tracer.types import Boundary, Kind

_OFTEN_OTHERS = frozenset({Kind.INPUT, Kind.LOSS, Kind.BUFFER})
"""Kinds that are stored by every rank: small, or, as batch norm's averages, copies by name only."""


def is_spare(boundary: Boundary) -> bool:
    """Tell whether a rank before this one, along an axis of replicas, declares the same tensor."""
    shard = boundary.shard
    if shard is None or boundary.kind in _OFTEN_OTHERS:
        return False
    places = zip(shard.placements, shard.coordinate, strict=True)
    return any(placement.kind == "replicate" and index > 0 for placement, index in places)
