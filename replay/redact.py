"""Takes out of traces what tells who recorded them where, and on request which tokens they were given.

What is left is what a verdict needs: names of modules and parameters, shapes, dtypes, values, layouts,
versions of packages. ``docs/pack.md`` lists both.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from tensortrace.replay.cut import Atom, atoms_of
from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.codec_values import digest, statistics
from tensortrace.tracer.environment import START
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, Environment, Kind, Manifest, RankManifest, Stats

REMOVED = (
    "environment variables, command lines, git commits, host names, process ids, run ids, times, the "
    "platform, options that named files, files and lines of the program, the text of errors, comments of "
    "layout files"
)
"""What ``--redact`` takes out, in words."""

INPUTS_REPLACED = (
    "token ids, labels and other integers that the program was given: each by another, the same everywhere"
)
INPUTS_LEFT_OUT = "the values of inputs that are not integers"

_VERSIONS = ("tensortrace", "torch", "python", "numpy")
_GIVEN = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.LOSS, Kind.BUFFER})


def anonymous(trace: Trace) -> Trace:
    """Return a trace without what tells who recorded it where; its boundaries keep all else."""
    ranks = tuple(_anonymous_rank(rank) for rank in trace.ranks)
    manifest = trace.manifest and _anonymous_run(trace.manifest)
    return Trace(trace.path, manifest, ranks, ())


def _anonymous_run(manifest: Manifest) -> Manifest:
    return replace(
        manifest, run_id="redacted", command=(), started_at=0.0,
        ended_at=None if manifest.ended_at is None else 0.0, environment=_surroundings(manifest.environment),
    )  # fmt: skip


def _anonymous_rank(rank: RankTrace) -> RankTrace:
    entries = tuple(_anonymous_entry(entry) for entry in rank.entries)
    found = copy.copy(rank)
    found.entries, found.problems = entries, ()
    found.manifest = rank.manifest and _anonymous_manifest(rank.manifest)
    return found


def _anonymous_manifest(manifest: RankManifest) -> RankManifest:
    window = manifest.window
    if window is not None and window.triggered is not None:
        window = replace(window, triggered=replace(window.triggered, at=0.0, text=""), notes=())
    ended = manifest.ended and ":".join(manifest.ended.split(":")[:2])
    return replace(
        manifest, pid=0, host="", environment=_surroundings(manifest.environment), window=window, ended=ended
    )


def _surroundings(environment: Environment) -> Environment:
    versions = {name: text for name, text in environment.versions.items() if name in _VERSIONS}
    flags = {name: text for name, text in environment.flags.items() if not name.startswith(START)}
    return Environment(versions=versions, flags=flags)


def _anonymous_entry(entry: Entry) -> Entry:
    return replace(entry, meta=replace(entry.meta, source=None)) if entry.meta.source else entry


class Content(NamedTuple):
    """What stands for a tensor: its digest, and where values are kept its statistics and logical bytes."""

    digest: str
    stats: Stats | None
    payload: Bytes | None


class OtherTokens:
    """Replaces the integers that the traces' programs were given, each by the same other one everywhere.

    Values that are not replaced: negative ones, those that a loss ignores, and 0 and 1 in tensors that hold
    nothing else, which are masks. The new ones are drawn from those up to the greatest, by a generator that
    cannot be seeded.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._secret = random.SystemRandom()
        self._salt = self._secret.randbytes(16)
        self._digests = {entry.digest for _, entry in atoms_of(traces) if _is_given(entry)}
        self._values = dict(self._read(traces))
        self._other = self._drawn(traces)
        self._contents: dict[str, Content] = {}

    def _read(self, traces: Sequence[Trace]) -> Iterator[tuple[str, Bytes]]:
        for trace in traces:
            for rank in trace.ranks:
                for entry in rank.entries:
                    if entry.digest in self._digests and rank.stored(entry):
                        yield entry.digest, rank.read_bytes(entry)

    def _drawn(self, traces: Sequence[Trace]) -> Mapping[int, int]:
        ignored = {entry.meta.ignore_index for _, entry in atoms_of(traces)}
        entries = {entry.digest: entry for _, entry in atoms_of(traces) if entry.digest in self._values}
        found: set[int] = set()
        for known, entry in entries.items():
            held = {int(value) for value in np.unique(_integers(entry, self._values[known]))}
            found |= set() if held <= {0, 1} else held
        old = sorted(value for value in found if value >= 0 and value not in ignored)
        new = self._secret.sample(range(old[-1] + 1), len(old)) if old else []
        return dict(zip(old, new, strict=True))

    def content(self, entry: Entry, payload: Bytes | None) -> Content:
        """Return what stands for an entry's tensor; itself where it is none that the program was given."""
        if entry.digest not in self._digests:
            return Content(entry.digest, entry.stats, payload)
        if entry.digest not in self._contents:
            self._contents[entry.digest] = self._replaced(entry)
        return self._contents[entry.digest]

    def _replaced(self, entry: Entry) -> Content:
        held = self._values.get(entry.digest)
        if held is None:  # only the digest is known: of few numbers it could be found by trying
            return Content(xxhash.xxh3_128_hexdigest(self._salt + entry.digest.encode()), None, None)
        old = _integers(entry, held)
        kept = set(np.unique(old).tolist()) <= {0, 1}
        new = old if kept else np.array([self._other.get(int(v), int(v)) for v in old], old.dtype)
        data = new.view(np.uint8)
        return Content(digest(entry.dtype, entry.local_shape, data), statistics(entry.dtype, data), data)


def _is_given(entry: Entry) -> bool:
    return (
        entry.kind in _GIVEN and "int" in entry.dtype and (entry.kind != Kind.LOSS or entry.slot == "target")
    )


def _integers(entry: Entry, data: Bytes) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.dtype(entry.dtype).newbyteorder("<"))


def other_inputs(traces: Sequence[Trace], kept: Iterable[Atom]) -> frozenset[Atom]:
    """Return the boundaries that hold, or repeat, what a program was given that is not integers."""
    entries = dict(atoms_of(traces))
    given = {
        entry.digest for entry in entries.values() if entry.kind == Kind.INPUT and "float" in entry.dtype
    }
    return frozenset(atom for atom in kept if entries[atom].digest in given)


def without_comments(text: str) -> str:
    """Return a TOML file without the lines that are comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines) + "\n"
