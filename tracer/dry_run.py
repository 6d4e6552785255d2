"""Counts what a recording would hold, and writes no file."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer.notices import say
from tensortrace.tracer.types import INIT_STEP, LADDER, Boundary, Kind, RankManifest


class Tally:
    """Stands in for the files of a rank: adds up bytes per kind of ``init`` and of one step.

    Bytes are of the tensors as they are, before deduplication and compression. Used on the writer thread.
    """

    def __init__(self) -> None:
        self._init_bytes = 0
        self._step_bytes: Counter[Kind] = Counter()
        self._step_count: Counter[Kind] = Counter()
        self._manifest: RankManifest | None = None

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> None:
        """Count one boundary."""
        if boundary.step == INIT_STEP:
            self._init_bytes += payload.nbytes
        else:
            self._step_bytes[boundary.kind] += payload.nbytes
            self._step_count[boundary.kind] += 1

    def end_step(self) -> None:
        """Do nothing: there is nothing to seal."""

    def write_manifest(self, manifest: RankManifest) -> None:
        """Keep the latest manifest for the summary."""
        self._manifest = manifest

    def close(self) -> None:
        """Say on stderr what was counted."""
        assert self._manifest is not None
        for line in self.summary(self._manifest):
            say(f"rank {self._manifest.rank}: {line}")

    def summary(self, manifest: RankManifest) -> list[str]:
        """Return the lines that a person reads: sizes, kinds found, rungs absent and why."""
        lines = [
            f"dry run: {_size(self._step_bytes.total())} per step, {_size(self._init_bytes)} for init "
            "(before deduplication and compression)"
        ]
        lines += [
            f"  {kind.value}: {self._step_count[kind]} boundaries, {_size(self._step_bytes[kind])}"
            for kind in Kind
            if self._step_count[kind]
        ]
        lines += [
            f"  {kind.value}: absent ({manifest.absent.get(kind.value, 'not seen in this step')})"
            for kind in LADDER
            if not self._step_count[kind]
        ]
        return [*lines, "recording is off from here; the program runs on as it would without us"]


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"
