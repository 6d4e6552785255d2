"""Plants an error of a stated size at one boundary of a recorded trace, to see whether a diff finds it.

A copy of the trace is written, through the recorder's own writer, in which one boundary has other values on
every rank that holds it or a part of it. Nothing computed from it changes: so it is the one boundary that
diverges although everything it was computed from agrees.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from tensortrace.diff.compare import EPS
from tensortrace.diff.result import Where
from tensortrace.tracer import layout
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import INIT_STEP, Boundary, Entry
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import logical_bytes

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
"""Makes other values of a boundary's, float64 (complex128), with random numbers that replicas share."""


@dataclass(frozen=True)
class Place:
    """The boundary that is changed; what is None may be anything.

    A diff that compares the microbatches of a window together names none of them: then all are changed.
    """

    step: int
    kind: str
    name: str
    slot: str
    microbatch: int | None = None
    call: int | None = None

    @classmethod
    def of(cls, where: Where) -> Place:
        """Return the place of a boundary as a result names it, in the numbering of the trace ``a``."""
        step = INIT_STEP if where.step == "init" else int(where.step)
        return cls(step, where.kind, where.name, where.slot, where.microbatch)

    def holds(self, entry: Entry) -> bool:
        """Tell whether an entry is of this boundary."""
        wanted = ((field.name, getattr(self, field.name)) for field in fields(self))
        return all(value is None or getattr(entry, name) == value for name, value in wanted)


def inject(trace: Path, out: Path, place: Place, factor: float, *, seed: int = 0) -> int:
    """Write ``trace`` to ``out`` with one boundary multiplied by ``1 + factor`` on every rank that holds it.

    A coherent error: one common factor. In low precision a small factor would be lost by rounding to the
    nearest, where the program's own error would have been rounded with the value: so each element is rounded
    up or down at random, such that on average it is the product. Equal replicas stay equal. Returns the
    number of tensors changed; raises ValueError where there is none, or one whose dtype is no float.
    """
    return rewrite(trace, out, place, lambda values, _: values * (1 + factor), seed=seed)


def inject_noise(trace: Path, out: Path, place: Place, size: float, *, seed: int = 0) -> int:
    """Write ``trace`` to ``out`` with each element of one boundary larger or smaller by ``size``, at random.

    An incoherent error of relative L2 norm ``size``, of the whole tensor and of any part of it: what a diff
    cuts away, such as padding, takes none of it along.
    """

    def noisy(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.asarray(values * (1 + size * random.choice((-1.0, 1.0), size=values.shape)))

    return rewrite(trace, out, place, noisy, seed=seed)


def rewrite(trace: Path, out: Path, place: Place, change: Change, *, seed: int = 0) -> int:
    """Write ``trace`` to ``out`` with one boundary changed; return the number of tensors changed.

    The copy is a valid trace: digests, statistics and files are those of the new values.
    """
    changed = 0
    out.mkdir(parents=True)
    for name in (layout.MANIFEST, layout.LAYOUT):
        if (trace / name).exists():
            shutil.copyfile(trace / name, out / name)
    with Trace.open(trace) as opened:
        for rank in opened.ranks:
            changed += _rewrite_rank(rank, out, place, change, seed)
    if not changed:
        raise ValueError(f"{trace}: no tensor at {place}")
    return changed


def _rewrite_rank(rank: RankTrace, out: Path, place: Place, change: Change, seed: int) -> int:
    changed = 0
    with RankWriter(out, rank.rank, attempt=rank.attempt) as writer:
        for entry, data in _contents(rank):
            if place.holds(entry):
                data = _changed(entry, rank.read(entry), change, seed)
                changed += 1
            writer.append(_boundary(entry), data)
        if rank.manifest is not None:
            writer.write_manifest(replace(rank.manifest))
    return changed


def _contents(rank: RankTrace) -> Iterator[tuple[Entry, np.ndarray]]:
    for entry in rank.entries:
        yield entry, rank.read_bytes(entry)


def _boundary(entry: Entry) -> Boundary:
    return Boundary(**{name: getattr(entry, name) for name in Boundary.__struct_fields__})


def _changed(entry: Entry, values: np.ndarray, change: Change, seed: int) -> np.ndarray:
    """Return the bytes of the changed values, rounded at random to the entry's dtype."""
    if entry.dtype not in ("float64", "float32", "float16", "bfloat16"):
        raise ValueError(f"{entry.name}: {entry.dtype} cannot be changed by a little")
    random = np.random.default_rng(seed)  # the same for every rank: replicas stay equal
    wide = np.asarray(change(values.astype(np.float64), random))
    if entry.dtype != "float64":
        with np.errstate(divide="ignore", invalid="ignore"):
            spacing = EPS[entry.dtype] * np.exp2(np.floor(np.log2(np.abs(wide))))
        spacing = np.where(np.isfinite(spacing), spacing, 0.0)
        wide = wide + (random.random(size=wide.shape) - 0.5) * spacing
    stored = {"bfloat16": np.float32}.get(entry.dtype, entry.dtype)
    with np.errstate(over="ignore"):
        return logical_bytes(wide.astype(stored), entry.dtype)
