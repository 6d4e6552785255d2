"""One rank of a trace: its entries, and any one tensor of them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer import layout
from tensortrace.tracer.codec_dtypes import Bytes, values
from tensortrace.tracer.errors import DamagedTrace, NotKept
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.manifest import read_rank_manifest
from tensortrace.tracer.reader_copies import Copies
from tensortrace.tracer.reader_index import OnDamage, load, segment_numbers
from tensortrace.tracer.reader_ranges import RangeReader
from tensortrace.tracer.reader_segment import find_segment, read_blob
from tensortrace.tracer.reader_window import kept_of
from tensortrace.tracer.types import Blob, Entry, RankManifest


class RankTrace:
    """One rank of an open trace; reading holds no file open and may be done on several threads.

    ``entries`` are in order of their events, with their shards in place. ``problems`` say what is
    missing or, when salvaging, damaged. ``manifest`` is None where ``rank.json`` is missing.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        attempt: int,
        manifest: RankManifest | None,
        entries: tuple[Entry, ...],
        problems: tuple[str, ...],
        limit_bytes: int,
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.attempt = attempt
        self.manifest = manifest
        self.entries = entries
        self.limit_bytes = limit_bytes
        self.copies: Copies[RankTrace] | None = None
        self._ranges: dict[int, RangeReader] = {}
        self._lock = threading.Lock()
        self._blobs = {entry.event: entry.blob for entry in entries if entry.blob is not None}
        self._sizes = {number: _size(folder, number) for number in segment_numbers(folder)}
        self.problems = (*problems, *_ending(folder, manifest, len(entries)), *self._lost_bytes())

    @classmethod
    def open(cls, folder: Path, rank: int, attempt: int, *, on_damage: OnDamage, limit_bytes: int) -> Self:
        """Read the manifest and the entries of a rank's folder."""
        problems: list[str] = []
        try:
            manifest = _read_manifest(folder, rank, attempt)
        except DamagedTrace as error:
            if on_damage == "refuse":
                raise
            problems.append(str(error))
            manifest = None
        loaded = load(folder, manifest.ignorable if manifest else (), on_damage)
        problems += loaded.problems
        kept = kept_of(loaded.entries, manifest.window if manifest else None)
        if manifest is not None and (hidden := len(loaded.entries) - len(kept)):
            count = max(manifest.boundaries - hidden, 0)
            manifest = msgspec.structs.replace(manifest, boundaries=count)
        return cls(folder, rank, attempt, manifest, tuple(kept), tuple(problems), limit_bytes)

    def stored(self, entry: Entry) -> bool:
        """Tell whether the entry's bytes are there: kept, by this rank or for it, and not cut off."""
        source, entry = self._holder(entry)
        blob = source.blob_of(entry)
        return blob is not None and source._there(blob)

    def blob_of(self, entry: Entry) -> Blob | None:
        """Return where the entry's bytes lie, which may be another event's blob."""
        return entry.blob if entry.same_as is None else self._blobs.get(entry.same_as)

    def read(self, entry: Entry) -> NDArray[np.generic]:
        """Return the tensor, of shape ``local_shape``; its digest was checked.

        bfloat16 and 8-bit floats come as float32, complex32 as complex64, exactly; other dtypes are
        native. Raises as ``read_bytes`` does.
        """
        return values(entry.dtype, self.read_bytes(entry)).reshape(entry.local_shape)

    def read_bytes(self, entry: Entry, *, checksums: bool = False) -> Bytes:
        """Return the logical bytes (little-endian, row-major) as a flat array; the digest was checked.

        The ``checksums`` of frames say nothing more of the tensor, but of the file.

        Raises DamagedTrace naming file and offset, NotKept where the bytes were never kept, or TraceError
        where they exceed the trace's ``limit_bytes``.
        """
        source, entry = self._holder(entry)
        blob, path = source._located(entry)
        return read_blob(path, entry, blob, self.limit_bytes, checksums=checksums)

    def read_range(self, entry: Entry, start: int, stop: int) -> NDArray[np.generic]:
        """Return the elements [start, stop) of the flattened tensor, as ``read`` gives them.

        Memory is that of the range; the digest of the whole tensor was checked in a pass of its own, once.
        """
        reader, path = self._reader(entry)
        return values(entry.dtype, reader.read(path, start, stop))

    def through(self, entry: Entry, most: int) -> Iterator[NDArray[np.generic]]:
        """Yield the tensor as ``blocks`` does, for who goes through all of it before it uses any result.

        The digest is checked along the way, in the place of a pass of its own: the last step raises
        DamagedTrace where it is another.
        """
        if math.prod(entry.local_shape) <= most:
            yield from self.blocks(entry, most)
            return
        shapes = [shape for _, shape in block_grid(entry.local_shape, most)]
        reader, path = self._reader(entry)
        stops = list(accumulate(map(math.prod, shapes)))
        for shape, found in zip(shapes, reader.through(path, stops), strict=True):
            yield values(entry.dtype, found).reshape(shape)

    def _reader(self, entry: Entry) -> tuple[RangeReader, Path]:
        """Return what reads ranges of an entry, and from which segment."""
        source, entry = self._holder(entry)
        blob, path = source._located(entry)
        holder = entry.event if entry.same_as is None else entry.same_as
        with source._lock:
            reader = source._ranges.get(holder)
            if reader is None:
                reader = source._ranges[holder] = RangeReader(path, entry, blob)
        return reader, path

    def blocks(self, entry: Entry, most: int, only: int | None = None) -> Iterator[NDArray[np.generic]]:
        """Yield the tensor in the boxes of ``block_grid``, of at most ``most`` elements each, or one alone.

        Small tensors come from one read. Raises as ``read`` does.
        """
        if math.prod(entry.local_shape) <= most:
            if 0 not in entry.local_shape and not only:
                yield self.read(entry)
            return
        start = 0
        for number, (_, shape) in enumerate(block_grid(entry.local_shape, most)):
            stop = start + math.prod(shape)
            if only is None or only == number:
                yield self.read_range(entry, start, stop).reshape(shape)
            start = stop

    def _holder(self, entry: Entry) -> tuple[RankTrace, Entry]:
        """Return the rank and the entry that have the bytes: another's where they were left to it."""
        if self.copies is None or self.blob_of(entry) is not None:
            return self, entry
        return self.copies.find(entry) or (self, entry)

    def _located(self, entry: Entry) -> tuple[Blob, Path]:
        blob = self.blob_of(entry)
        if blob is None:
            if self.copies is not None and self.copies.left(entry):
                raise NotKept(
                    f"rank {self.rank}, event {entry.event} ({entry.name}): its bytes were left to the first "
                    "rank with a copy (--dedup-replicas), and no rank that is there has these"
                )
            raise NotKept(
                f"rank {self.rank}, event {entry.event} ({entry.name}): only digest and statistics were kept"
            )
        path = find_segment(self.folder, blob.segment)
        if path is None:
            name = layout.segment_name(blob.segment)
            raise DamagedTrace(f"{self.folder / name}: the segment is missing")
        return blob, path

    def _there(self, blob: Blob) -> bool:
        return blob.offset + blob.length <= self._sizes.get(blob.segment, -1)

    def _lost_bytes(self) -> list[str]:
        lost: dict[int, int] = {}
        for blob in self._blobs.values():
            if not self._there(blob):
                lost[blob.segment] = lost.get(blob.segment, 0) + 1
        return [
            f"{self.folder / layout.segment_name(number)}: missing or cut off; {count} tensors are lost"
            for number, count in sorted(lost.items())
        ]


def _read_manifest(folder: Path, rank: int, attempt: int) -> RankManifest | None:
    path = folder / layout.RANK_MANIFEST
    try:
        manifest = read_rank_manifest(path)
    except FileNotFoundError:
        return None
    if (manifest.rank, manifest.attempt) != (rank, attempt):
        raise DamagedTrace(
            f"{path}: field rank or attempt",
            found=f"rank {manifest.rank}, attempt {manifest.attempt}",
            expected=f"rank {rank}, attempt {attempt}, as its folder is named",
        )
    return manifest


def _ending(folder: Path, manifest: RankManifest | None, entries: int) -> list[str]:
    """Return what a rank's manifest says of boundaries that aren't there."""
    if manifest is None:
        return [f"{folder}: no {layout.RANK_MANIFEST}; what this rank promised is unknown"]
    problems = []
    if manifest.ended is None:
        problems.append(f"{folder}: the rank did not finish")
    elif manifest.ended != "finished":
        problems.append(f"{folder}: the rank ended early ({manifest.ended[:200]})")
    if manifest.drops.count:
        problems.append(f"{folder}: {manifest.drops.count} boundaries were dropped while recording")
    if entries < manifest.boundaries:
        problems.append(f"{folder}: {manifest.boundaries - entries} of {manifest.boundaries} are lost")
    return problems


def _size(folder: Path, number: int) -> int:
    path = find_segment(folder, number)
    return os.stat(path).st_size if path is not None and path.is_file() else -1
