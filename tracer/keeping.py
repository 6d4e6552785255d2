"""Decides what the writer keeps of each boundary, by the levels that were promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.levels import Levels
from tensortrace.tracer.replicas import Spares
from tensortrace.tracer.sketching import Sketcher
from tensortrace.tracer.types import Boundary, Mesh, Promise, Sketch


class Kept(NamedTuple):
    """What is kept beside digest and statistics: the bytes, and a sketch or the event that has it."""

    in_full: bool = True
    sketch: Sketch | None = None
    sketch_ref: int | None = None


_IN_FULL, _STATS = Kept(), Kept(in_full=False)

_INDEPENDENT: dict[str, object] = {
    "steps": (), "kinds": (), "include": (), "exclude": (), "zoom": (), "zoom_steps": (),
    "level": "full", "levels": (),
}  # fmt: skip
"""The fields of a promise that say which boundaries there are, and how each is kept by itself."""


class Keeping:
    """Sees every boundary of one rank in order; used by its writer thread.

    ``needs_bytes`` tells whether it may want to see, or keep, the bytes of a boundary whose content is known
    already: for a sketch, which depends on places too, and where it decides by what went before.
    """

    def __init__(self, promise: Promise) -> None:
        """Raise ValueError for levels that are none."""
        self._levels = Levels(promise)
        self._spares = Spares() if promise.dedup_replicas else None
        self._sketcher = Sketcher() if Levels.sketches(promise) else None
        by_itself = msgspec.structs.replace(promise, **_INDEPENDENT) == Promise()
        self.needs_bytes = self._sketcher is not None or not by_itself
        self._all_full = promise.level == "full" and not promise.levels

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Take note of the meshes that shards refer to."""
        if self._sketcher is not None:
            self._sketcher.know(meshes)

    def forget(self) -> None:
        """Let nothing refer to the sketch or the bytes of an earlier boundary any more."""
        if self._sketcher is not None:
            self._sketcher.forget()
        if self._spares is not None:
            self._spares.forget()

    def held(self, boundary: Boundary) -> str:
        """Name how a boundary is kept; may be called on any thread."""
        return "full" if self._all_full else self._levels.of(boundary).keeps

    def decide(self, boundary: Boundary, data: Bytes, digest: str) -> Kept:
        """Return what to keep; what should have a sketch and can have none is kept in full."""
        level = self._levels.of(boundary)
        if self._sketcher is not None:
            self._sketcher.see(boundary, data)
        left = self._spares is not None and self._spares.leaves(boundary, digest)
        if left and level.keeps == "full":
            return _STATS
        if self._sketcher is None or level.keeps != "sketch":
            return _IN_FULL if level.keeps == "full" else _STATS
        found = self._sketcher.sketch(boundary, data, digest, level.size)
        if found is None:
            return _IN_FULL
        return Kept(False, None, found) if isinstance(found, int) else Kept(False, found, None)
