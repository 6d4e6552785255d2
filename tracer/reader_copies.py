"""Where the bytes lie of a tensor that its rank left to another one that has a copy of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from tensortrace.tracer.levels import Levels
from tensortrace.tracer.replicas import is_spare
from tensortrace.tracer.types import Entry, Promise


class _HasEntries(Protocol):
    entries: tuple[Entry, ...]


_Rank = TypeVar("_Rank", bound=_HasEntries)


class Copies(Generic[_Rank]):
    """The stored tensors of all ranks by digest, which says dtype, shape and bytes; on several threads.

    They are listed when the first copy is asked for, and only of a trace that was recorded with
    ``--dedup-replicas``.
    """

    def __init__(self, ranks: Sequence[_Rank], promise: Promise) -> None:
        self._ranks = ranks
        self._levels = Levels(promise)
        self._lock = threading.Lock()
        self._listed: dict[str, tuple[_Rank, Entry]] | None = None

    def find(self, entry: Entry) -> tuple[_Rank, Entry] | None:
        """Return a rank and its entry that has the bytes of one that has none; None where no rank has."""
        with self._lock:
            if self._listed is None:
                self._listed = {
                    held.digest: (rank, held)
                    for rank in reversed(self._ranks)
                    for held in rank.entries
                    if held.blob is not None
                }
        return self._listed.get(entry.digest)

    def left(self, entry: Entry) -> bool:
        """Tell whether an entry's bytes were left to another rank."""
        bare = entry.blob is None and entry.same_as is None
        return bare and is_spare(entry) and self._levels.of(entry).keeps == "full"
