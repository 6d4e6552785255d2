"""Store the boundaries of one rank: digest, deduplicate, encode, append, seal."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer import layout
from tensortrace.tracer.codec import Compress, Encoder
from tensortrace.tracer.codec_dtypes import Bytes, size_bytes
from tensortrace.tracer.codec_values import digest, statistics
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.keeping import Keeping, Kept, Summary
from tensortrace.tracer.manifest import encode_entry, replace_manifest
from tensortrace.tracer.types import Blob, Boundary, Entry, Promise, RankManifest, Shard, Stats
from tensortrace.tracer.writer_files import GrowingFile
from tensortrace.tracer.writer_segment import SegmentWriter

RESERVED_BYTES = 256 << 10
SEGMENT_BYTES = 1 << 30
SEAL_AT_STEP_BYTES = 64 << 20
REMEMBERED = 1 << 16
"""Distinct contents that are known by their digests: hundreds of bytes of memory each."""

_MAX_SHARDS = 1 << 16
_IN_FULL = Promise()
_NOTHING = np.empty(0, np.uint8)

Payload = bytes | bytearray | memoryview | NDArray[np.uint8]


class Mark(NamedTuple):
    """A place between two boundaries: what was written before it, dropped or not."""

    index_bytes: int
    segments: int
    boundaries: int


class _Line(NamedTuple):
    """An index line that is to be written once the segment up to ``end`` is in its file."""

    end: int
    text: bytes


class RankWriter:
    """Writes the folder of one rank; a boundary is finished once its index line is in the file.

    That is when ``append`` returns, and for what ``append_known`` took when its block is full, or after
    ``flush``. Files are opened at construction, before the training starts; OSError (also FileExistsError for
    a folder that another run wrote) is the caller's, who then stands down and calls ``close``. After a
    failed call everything finished before is intact. Used by one thread.
    """

    def __init__(
        self, root: Path, rank: int, *, attempt: int = 0, compress: Compress = "auto",
        dedup: int = REMEMBERED, promise: Promise = _IN_FULL,
    ) -> None:  # fmt: skip
        """Create ``root/rankNNNNN``; ``dedup`` is how many of the latest distinct tensors are remembered.

        Of ``promise`` the levels count: ValueError for one that is none.
        """
        self.folder = layout.rank_folder(root, rank, attempt)
        self.boundaries = 0
        self._rank = rank
        self._dedup = dedup
        self._encoder = Encoder(compress)
        self.keeping = Keeping(promise)
        self._seen: OrderedDict[str, tuple[int | None, Stats]] = OrderedDict()
        self._shards: dict[Shard, int] = {}
        self._segments = 0
        self._segment: SegmentWriter | None = None
        self._lines: deque[_Line] = deque()
        self._dropped = self._disowned = Mark(0, 0, 0)
        self.folder.mkdir(parents=True)
        self._index = GrowingFile(self.folder / layout.INDEX)
        self._open_segment()

    def append(self, boundary: Boundary, payload: Payload, *, hurried: bool = False) -> Entry:
        """Store one boundary and return its index entry, as written.

        ``payload`` are the logical bytes: little-endian elements in row-major order, contiguous.
        ``hurried`` asks for speed rather than size, where ``compress`` leaves the choice. Raises
        OSError where they cannot be written, TraceError where the boundary can't be (unknown dtype, wrong
        size, a name that no reader accepts).
        """
        data = _flat_bytes(payload)
        self._check_size(boundary, data)
        found = digest(boundary.dtype, boundary.local_shape, data)
        return self._append(boundary, found, data, hurried, "", None, finish=True)

    @property
    def remembers(self) -> int:
        """For how many further boundaries a content is known; 0 where each is looked at again anyhow."""
        return 0 if self.keeping.needs_bytes else self._dedup

    def append_known(
        self, boundary: Boundary, digest: str, payload: NDArray[np.uint8] | None, *, hurried: bool = False,
        held: str = "", summary: Summary | None = None,
    ) -> Entry:  # fmt: skip
        """Store one boundary whose digest is known; without payload or summary its content is, as ``held``.

        It is finished once its block is full, or after ``flush``. Raises TraceError where its content is
        not known, and as ``append`` does.
        """
        data = None
        if payload is not None:
            data = _flat_bytes(payload)
            self._check_size(boundary, data)
        return self._append(boundary, digest, data, hurried, held, summary, finish=False)

    def _append(
        self, boundary: Boundary, digest: str, data: Bytes | None, hurried: bool, held: str,
        summary: Summary | None, *, finish: bool,
    ) -> Entry:  # fmt: skip
        if self._index.closed:
            raise TraceError(f"{self.folder}: appended to after it was closed")
        segment = self._segment_with_room(boundary)
        with self._taking_back(segment):
            entry = self._store(segment, boundary, digest, data, hurried, held, summary)
            if finish:
                self.flush()
        self._remember(segment, boundary, entry)
        self._finish_written(segment)
        return entry

    @contextmanager
    def _taking_back(self, segment: SegmentWriter) -> Iterator[None]:
        """Take a boundary back that could not be stored."""
        size, boundaries = segment.size, segment.boundaries
        try:
            yield
        except BaseException:
            if segment.size > size:
                segment.rollback(size)
                segment.boundaries = boundaries
            while self._lines and self._lines[-1].end > size:
                self._lines.pop()
            raise

    def flush(self) -> None:
        """Finish every boundary. Raises OSError, and what was not finished before is then lost."""
        segment = self._segment
        if segment is None or not self._lines:
            return
        try:
            segment.flush()
        except OSError:
            self._lines.clear()
            segment.lose()
            raise
        self._finish_written(segment)

    def _finish_written(self, segment: SegmentWriter) -> None:
        """Write the index lines of what is in the segment's file by now."""
        if not self._lines or self._lines[0].end > segment.written:
            return
        done = []
        while self._lines and self._lines[0].end <= segment.written:
            done.append(self._lines.popleft())
        try:
            self._index.append(b"".join(line.text for line in done))
        except OSError:
            self._lines.clear()
            segment.lose()
            raise
        segment.keep(done[-1].end, len(done))
        self.boundaries += len(done)

    def _check_size(self, boundary: Boundary, data: Bytes) -> None:
        size = size_bytes(boundary.dtype, boundary.local_shape)
        if data.size != size:
            raise TraceError(f"{boundary.name}: {data.size} bytes", expected=f"{size}")

    def _store(
        self, segment: SegmentWriter, boundary: Boundary, hexdigest: str, data: Bytes | None, hurried: bool,
        held: str, summary: Summary | None,
    ) -> Entry:  # fmt: skip
        """Write the frames, then the record, then the index line; memory changes only afterwards."""
        event, stats = self._seen.get(hexdigest, (None, None))
        if data is not None:
            kept = self.keeping.decide(boundary, data, hexdigest)
        else:
            stats = stats if summary is None else summary.stats
            kept = self._known(
                boundary, hexdigest, held, summary, is_known=stats is not None, in_full=event is not None
            )
        if stats is None:
            stats = statistics(boundary.dtype, data if data is not None else _NOTHING)
        blob = None
        if event is None and kept.in_full:
            blob = self._put(segment, boundary, data if data is not None else _NOTHING, hurried)
        shard, shard_ref = self._place(boundary.shard)
        entry = Entry(
            event=boundary.event, step=boundary.step, microbatch=boundary.microbatch, kind=boundary.kind,
            name=boundary.name, slot=boundary.slot, dtype=boundary.dtype, local_shape=boundary.local_shape,
            call=boundary.call, recompute=boundary.recompute, shard=shard, producers=boundary.producers,
            meta=boundary.meta, digest=hexdigest, stats=stats, sketch=kept.sketch, blob=blob, same_as=event,
            shard_ref=shard_ref, sketch_ref=kept.sketch_ref,
        )  # fmt: skip
        self._commit(segment, entry)
        return entry

    def _known(
        self, boundary: Boundary, hexdigest: str, held: str, summary: Summary | None, *, is_known: bool,
        in_full: bool,
    ) -> Kept:  # fmt: skip
        try:
            if not is_known:
                raise KeyError(hexdigest)
            return self.keeping.decide_known(boundary, hexdigest, held, summary, in_full=in_full)
        except KeyError:
            raise TraceError(f"event {boundary.event}: its content is not known") from None

    def rewrite(self, entry: Entry, payload: NDArray[np.uint8] | None) -> None:
        """Write an entry of another trace again, with its bytes if it holds any; in order, shards in place.

        Raises as ``append`` does.
        """
        segment = self._segment_with_room(entry)
        with self._taking_back(segment):
            blob = None if payload is None else self._put(segment, entry, _flat_bytes(payload), False)
            shard, shard_ref = self._place(entry.shard)
            new = msgspec.structs.replace(entry, blob=blob, shard=shard, shard_ref=shard_ref)
            self._commit(segment, new)
        self._remember(segment, entry, new)
        self._finish_written(segment)

    def _place(self, shard: Shard | None) -> tuple[Shard | None, int | None]:
        """Return the shard, or the event of the earlier line which has it."""
        declared = None if shard is None else self._shards.get(shard)
        return (shard if declared is None else None), declared

    def _commit(self, segment: SegmentWriter, entry: Entry) -> None:
        line = encode_entry(entry)
        segment.commit(line)
        self._lines.append(_Line(segment.size, line))

    def _put(self, segment: SegmentWriter, boundary: Boundary, data: Bytes, hurried: bool) -> Blob:
        self._check_size(boundary, data)  # there may be none of a content that was not kept before
        offset = segment.size
        codec = self._encoder.codec_of(boundary.dtype, data, hurried=hurried)
        segment.put(self._encoder.frames(codec, boundary.dtype, data, hurried=hurried))
        return Blob(segment.number, offset, segment.size - offset, data.size, codec)

    def _remember(self, segment: SegmentWriter, boundary: Boundary, entry: Entry) -> None:
        if entry.blob is not None:
            segment.header.add_tensor(boundary, entry.blob.codec)
            self._remember_digest(entry, entry.event)
        elif entry.same_as is not None:
            segment.header.add_alias(boundary, entry.same_as)
            if entry.digest in self._seen:
                self._seen.move_to_end(entry.digest)
        else:
            segment.header.add_unstored(boundary)
            self._remember_digest(entry, None)
        if entry.shard is not None and len(self._shards) < _MAX_SHARDS:
            self._shards[entry.shard] = entry.event

    def _remember_digest(self, entry: Entry, event: int | None) -> None:
        """Remember content and the event that holds it, None where its bytes were not kept."""
        if not self._dedup:
            return
        assert entry.stats is not None
        self._seen[entry.digest] = (event, entry.stats)
        self._seen.move_to_end(entry.digest)
        if len(self._seen) > self._dedup:
            self._seen.popitem(last=False)  # the oldest

    def end_step(self) -> None:
        """Finish the step, and seal the segment if it can stand alone; call after a step's last boundary."""
        self.flush()
        if self._segment is not None and self._segment.size >= SEAL_AT_STEP_BYTES:
            self._seal()

    def cut(self) -> Mark:
        """Seal the open segment and forget what was stored, so that nothing later refers to it."""
        self._seal()
        self._seen.clear()
        self._shards.clear()
        self.keeping.forget()
        gone = self._dropped
        return Mark(
            gone.index_bytes + self._index.size, self._segments, self._disowned.boundaries + self.boundaries
        )

    def disown(self, mark: Mark) -> None:
        """Count what lies before a mark, at which the writer was cut, as gone; ``drop`` removes it.

        Between the two goes the manifest that says so: what is read after a kill is then never less than
        what it promises.
        """
        self.boundaries -= mark.boundaries - self._disowned.boundaries
        self._disowned = mark

    def drop(self) -> None:
        """Remove index lines and segments that were disowned. Raises OSError."""
        gone, mark = self._dropped, self._disowned
        if mark == gone:
            return
        self._index.drop_front(mark.index_bytes - gone.index_bytes)
        self._dropped = mark
        for number in range(gone.segments, mark.segments):
            (self.folder / layout.segment_name(number)).unlink(missing_ok=True)

    def write_manifest(self, manifest: RankManifest) -> None:
        """Finish every boundary and write ``rank.json`` atomically, with their number."""
        self.flush()
        self.keeping.know(manifest.meshes)
        whole = msgspec.structs.replace(manifest, boundaries=self.boundaries)
        replace_manifest(self.folder / layout.RANK_MANIFEST, whole)

    def close(self) -> None:
        """Seal the segment and the index; may be called again. OSError leaves ``.part`` files behind."""
        try:
            self._seal()
            if not self._index.closed:
                self._index.finish()
        finally:
            self._index.close()

    def _segment_with_room(self, boundary: Boundary) -> SegmentWriter:
        segment = self._segment
        if segment is not None and segment.size < SEGMENT_BYTES and segment.header.has_room(boundary):
            return segment
        self._seal()
        return self._open_segment()

    def _open_segment(self) -> SegmentWriter:
        self._segment = SegmentWriter(self.folder, self._rank, self._segments, RESERVED_BYTES)
        self._segments += 1
        return self._segment

    def _seal(self) -> None:
        try:
            self.flush()
        finally:
            segment, self._segment = self._segment, None
        if segment is None:
            return
        try:
            if segment.boundaries:
                segment.seal()
            else:
                segment.discard()
        finally:
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _flat_bytes(payload: Payload) -> Bytes:
    """Return the payload as a flat uint8 array without copying it."""
    if isinstance(payload, np.ndarray):
        return payload.reshape(-1).view(np.uint8)
    return np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
