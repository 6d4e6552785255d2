"""Faults that tests of the recorder inject into its own writing (``docs/trust.md``)."""

from __future__ import annotations

import errno
import time

import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.recorder import RankStore
from tensortrace.tracer.types import Boundary, RankManifest


class Faulty:
    """A rank's files with a fault: every append takes ``delay_s``, the ``full_at``-th finds a full disk."""

    def __init__(self, store: RankStore, *, delay_s: float = 0.0, full_at: int | None = None) -> None:
        self._store = store
        self._delay_s = delay_s
        self._full_at = full_at
        self._count = 0

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> object:
        """Store one boundary, late or not at all."""
        time.sleep(self._delay_s)
        self._count += 1
        if self._full_at is not None and self._count >= self._full_at:
            raise OSError(errno.ENOSPC, "No space left on device (injected)")
        return self._store.append(boundary, payload, hurried=hurried)

    def end_step(self) -> None:
        """Pass on."""
        self._store.end_step()

    def write_manifest(self, manifest: RankManifest) -> None:
        """Pass on."""
        self._store.write_manifest(manifest)

    def close(self) -> None:
        """Pass on."""
        self._store.close()


def with_fault(store: RankStore, faults: str) -> RankStore:
    """Return the store with the faults that ``slow:SECONDS`` or ``full:N`` name, or itself for none.

    Several faults are separated by commas; ``hook:NAME`` is for the hooks.
    """
    for fault in filter(None, faults.split(",")):
        name, _, value = fault.partition(":")
        if name == "slow":
            store = Faulty(store, delay_s=float(value))
        elif name == "full":
            store = Faulty(store, full_at=int(value))
        elif name != "hook":
            raise BadRequest(f"fault {fault!r}", expected="hook:NAME, slow:SECONDS or full:N")
    return store
