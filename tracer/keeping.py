"""Decides what the writer keeps of each boundary, by the levels that were promised."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

import msgspec
import numpy as np

from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.codec_values import statistics
from tensortrace.tracer.levels import Levels
from tensortrace.tracer.replicas import Spares
from tensortrace.tracer.sketching import Sketcher
from tensortrace.tracer.types import Boundary, Kind, Mesh, Promise, Sketch, Stats


class Kept(NamedTuple):
    """What is kept beside digest and statistics: the bytes, and a sketch or the event that has it."""

    in_full: bool = True
    sketch: Sketch | None = None
    sketch_ref: int | None = None


_SKETCH = "sketch "
_NOTHING = np.empty(0, np.uint8)

_IN_FULL, _STATS = Kept(), Kept(in_full=False)

_INDEPENDENT: dict[str, object] = {
    "steps": (), "kinds": (), "include": (), "exclude": (), "zoom": (), "zoom_steps": (),
    "level": "full", "levels": (),
}  # fmt: skip
"""The fields of a promise that say which boundaries there are, and how each is kept by itself."""


class Summary(NamedTuple):
    """What is kept of a tensor in place of its bytes."""

    stats: Stats
    sketch: Sketch | None = None


class Keeping:
    """Sees every boundary of one rank in order, on its writer thread.

    ``held``, ``look`` and ``summary`` may be called on any thread, before a boundary has its number: they see
    the boundaries, too, and know the samples by themselves. ``needs_bytes`` tells whether it may want the
    bytes of a boundary whose content is known already, because it decides by what went before.
    """

    def __init__(self, promise: Promise) -> None:
        """Raise ValueError for levels that are none."""
        self._levels = Levels(promise)
        self._spares = Spares() if promise.dedup_replicas else None
        self._sketcher = Sketcher() if Levels.sketches(promise) else None
        by_itself = msgspec.structs.replace(promise, **_INDEPENDENT) == Promise()
        self.needs_bytes = not by_itself
        self._early = Sketcher() if self._sketcher is not None and by_itself else None
        self._lock = threading.Lock()
        self._inputs = count()
        self._all_full = promise.level == "full" and not promise.levels

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        """Take note of the meshes that shards refer to; may be called on any thread."""
        if self._sketcher is not None:
            with self._lock:
                self._sketcher.know(meshes)
                if self._early is not None:
                    self._early.know(meshes)

    def forget(self) -> None:
        """Let nothing refer to the sketch or the bytes of an earlier boundary any more."""
        if self._sketcher is not None:
            self._sketcher.forget()
        if self._spares is not None:
            self._spares.forget()

    def sums(self, boundary: Boundary) -> bool:
        """Tell whether a summary may be kept of a boundary in place of its bytes."""
        return not self._all_full and self._levels.of(boundary).keeps != "full"

    def held(self, boundary: Boundary) -> str:
        """Name how a boundary is kept: of a known content, what is held alike needs no bytes."""
        if self._all_full:
            return "full"
        level = self._levels.of(boundary)
        if self._early is None:
            return level.keeps
        if boundary.kind is Kind.INPUT:  # whose bytes tell the samples
            return f"input {next(self._inputs)}"
        with self._lock:
            self._early.see(boundary, _NOTHING)
            placed = self._early.place(boundary, level.size) if level.keeps == "sketch" else None
        return level.keeps if placed is None else f"{_SKETCH}{placed.name}"

    def look(self, boundary: Boundary, data: Bytes) -> None:
        """Take note of the bytes of an input, before those of what follows come."""
        if self._early is not None and boundary.kind is Kind.INPUT:
            with self._lock:
                self._early.see(boundary, data)

    def summary(self, boundary: Boundary, data: Bytes) -> Summary | None:
        """Return what is kept in place of these bytes; None where they are kept. Call it after ``held``."""
        level = self._levels.of(boundary)
        if level.keeps == "full":
            return None
        sketch = None
        if level.keeps == "sketch":
            assert self._early is not None
            with self._lock:  # which also has the signs to itself
                placed = self._early.place(boundary, level.size)
                sketch = None if placed is None else self._early.make(boundary, data, placed)
            if sketch is None:
                return None
        return Summary(statistics(boundary.dtype, data), sketch)

    def decide_known(
        self, boundary: Boundary, digest: str, held: str, summary: Summary | None, *, in_full: bool
    ) -> Kept:
        """Return what to keep of a boundary without its bytes; raise KeyError if its sketch isn't known.

        ``in_full`` tells that its bytes are there: they are of what can have no sketch.
        """
        if self._sketcher is not None:
            self._sketcher.see(boundary, _NOTHING)
        if summary is None and not held.startswith(_SKETCH):
            return _IN_FULL if self._levels.of(boundary).keeps == "full" else _STATS
        assert self._sketcher is not None or summary is not None
        if self._sketcher is None or (summary is not None and summary.sketch is None):
            return _STATS
        if summary is not None:
            self._sketcher.remember(digest, held.removeprefix(_SKETCH), boundary.event)
            return Kept(False, summary.sketch)
        event = self._sketcher.made(digest, held.removeprefix(_SKETCH))
        if event is not None:
            return Kept(False, None, event)
        if not in_full:
            raise KeyError(digest)
        return _IN_FULL

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
