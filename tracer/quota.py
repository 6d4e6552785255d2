"""How much a rank may write: a store that counts bytes, and drops whole boundaries beyond a limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.keeping import Keeping, Summary
from tensortrace.tracer.settings import Settings
from tensortrace.tracer.staging import Remembering, Store
from tensortrace.tracer.types import Boundary, Entry

LOOK_EVERY_BYTES = 16 << 20
"""Free space is looked up once per this many bytes written."""


class Metered:
    """A store in front of a store; used on the writer thread.

    ``on_drop`` gets each boundary that the limits exclude, its bytes and the reason. Once a limit is
    reached nothing more is written: a trace with every second tensor missing helps nobody. ``full`` is then
    the reason.
    """

    def __init__(self, store: Store, settings: Settings, *, on_drop: Callable[[str, int], None]) -> None:
        self._store = store
        # asked once: to ask whether an object has a protocol's methods takes longer than to use one
        self._remembering = store if isinstance(store, Remembering) else None
        self._root = settings.root
        self._max_bytes = settings.max_bytes
        self._min_free_bytes = 0 if settings.dry_run else settings.min_free_bytes
        self._on_drop = on_drop
        self._written = 0
        self._look_at = 0
        self.full: str | None = None

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> object:
        """Store one boundary, or drop it where a limit has been reached."""
        if self._drops(boundary):
            return None
        return self._count(self._store.append(boundary, payload, hurried=hurried))

    @property
    def remembers(self) -> int:
        """For how many further boundaries the store behind this one knows a content."""
        return self._remembering.remembers if self._remembering is not None else 0

    @property
    def keeping(self) -> Keeping | None:
        """What decides how much of each boundary the store behind this one keeps."""
        return None if self._remembering is None else self._remembering.keeping

    def append_known(
        self, boundary: Boundary, digest: str, payload: NDArray[np.uint8] | None, *, hurried: bool = False,
        held: str = "", summary: Summary | None = None,
    ) -> object:  # fmt: skip
        """Store one boundary whose digest is known, or drop it where a limit has been reached."""
        if self._drops(boundary):
            return None
        assert self._remembering is not None
        entry = self._remembering.append_known(
            boundary, digest, payload, hurried=hurried, held=held, summary=summary
        )
        return self._count(entry)

    def flush(self) -> None:
        """Make what the store behind this one took last."""
        if self._remembering is not None:
            self._remembering.flush()

    def _drops(self, boundary: Boundary) -> bool:
        self.full = self.full or self._limit_reached()
        if self.full:
            self._on_drop(self.full, size_bytes(boundary.dtype, boundary.local_shape))
        return self.full is not None

    def _count(self, entry: object) -> object:
        if isinstance(entry, Entry) and entry.blob is not None:
            self._written += entry.blob.length
        return entry

    def _limit_reached(self) -> str | None:
        if self._max_bytes is not None and self._written >= self._max_bytes:
            return "max_bytes"
        if self._written >= self._look_at:
            self._look_at = self._written + LOOK_EVERY_BYTES
            if self._min_free_bytes and shutil.disk_usage(self._root).free < self._min_free_bytes:
                return "min_free"
        return None
