"""What the writer of one rank puts where, and what it does when the disk refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer import writer as writer_module
from tensortrace.tracer import writer_blocks
from tensortrace.tracer.codec_values import digest
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Entry, Kind, Placement, Promise, RankManifest, Shard
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of

ONES = np.ones((4, 3), "<f4")
SHARD = Shard(mesh="ddp", coordinate=(0,), placements=(Placement("replicate"),), global_shape=(4, 3))


def append(writer: RankWriter, event: int, array: np.ndarray = ONES, **fields: object) -> Entry:
    return writer.append(boundary_of(event, array, **fields), array.tobytes())


def damage(root: Path) -> list[str]:
    """Return what is wrong beyond the manifests that these tests don't write."""
    absent = ("no trace.json", "no rank.json")
    return [problem for problem in check(root) if not any(text in problem for text in absent)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_open_before_the_first_boundary_and_final_after_close(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 3, attempt=1)
    folder = tmp_path / "rank00003.r1"
    assert names(folder) == ["index.jsonl.part", "seg000000.safetensors.zst.part"]
    append(writer, 0)
    writer.close()
    writer.close()
    assert names(folder) == ["index.jsonl", "seg000000.safetensors.zst"]


def test_a_rank_without_boundaries_leaves_an_empty_index_only(tmp_path: Path) -> None:
    RankWriter(tmp_path, 0).close()
    assert names(tmp_path / "rank00000") == ["index.jsonl"]
    assert (tmp_path / "rank00000" / "index.jsonl").read_bytes() == b""


def test_a_folder_that_exists_is_refused(tmp_path: Path) -> None:
    RankWriter(tmp_path, 0).close()
    with pytest.raises(FileExistsError):
        RankWriter(tmp_path, 0)


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        first = append(writer, 0)
        again = append(writer, 1, slot="in.0")
        other_shape = append(writer, 2, ONES.reshape(3, 4))
    assert first.blob is not None
    assert first.same_as is None
    assert (again.blob, again.same_as, again.digest, again.stats) == (None, 0, first.digest, first.stats)
    assert other_shape.blob is not None


def test_deduplication_forgets_the_oldest_and_can_be_turned_off(tmp_path: Path) -> None:
    two, three = ONES * 2, ONES * 3
    with RankWriter(tmp_path, 0, dedup=2) as writer:
        for event, array in enumerate((ONES, two, three, ONES, three)):
            append(writer, event, array)
    with RankWriter(tmp_path, 1, dedup=0) as writer:
        append(writer, 0)
        append(writer, 1)
    ranks = Trace.open(tmp_path).ranks
    assert [entry.same_as for entry in ranks[0].entries] == [None, None, None, None, 2]
    assert [entry.same_as for entry in ranks[1].entries] == [None, None]


def test_a_shard_is_declared_once_and_referred_to(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        written = [append(writer, event, ONES * event, shard=SHARD) for event in range(3)]
    assert [(entry.shard, entry.shard_ref) for entry in written] == [(SHARD, None), (None, 0), (None, 0)]
    read = Trace.open(tmp_path).ranks[0].entries
    assert [(entry.shard, entry.shard_ref) for entry in read] == [(SHARD, None)] * 3


def test_a_segment_is_sealed_before_its_header_would_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RESERVED_BYTES", 4096)
    with RankWriter(tmp_path, 0) as writer:
        for event in range(40):
            append(writer, event, ONES * event, name=f"blocks.{event}.a/rather%long.name")
    segments = [name for name in names(tmp_path / "rank00000") if name.startswith("seg")]
    assert 2 < len(segments) < 14
    assert not any(name.endswith(".part") for name in segments)
    assert damage(tmp_path) == []


@pytest.mark.parametrize("name", ["x" * 4096, "/" * 4096, '"' * 4096, "é\U0001f600" * 2048])
def test_the_longest_names_fit_the_header(tmp_path: Path, name: str) -> None:
    with RankWriter(tmp_path, 0) as writer:
        for event in range(3):
            append(writer, event, ONES * event, name=name, slot=name, shard=SHARD)
    assert damage(tmp_path) == []


def test_segments_are_sealed_at_a_steps_end_once_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SEAL_AT_STEP_BYTES", (256 << 10) + 700)
    writer = RankWriter(tmp_path, 0)
    append(writer, 0)
    writer.end_step()
    assert "seg000000.safetensors.zst.part" in names(writer.folder)
    append(writer, 1, ONES * 2)
    writer.end_step()
    assert "seg000000.safetensors.zst" in names(writer.folder)
    append(writer, 2, ONES * 3)
    writer.close()
    assert [entry.blob.segment for entry in Trace.open(tmp_path).ranks[0].entries if entry.blob] == [0, 0, 1]


def test_a_segment_grows_to_its_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "SEGMENT_BYTES", (256 << 10) + 1)
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0)
        append(writer, 1, ONES * 2)
    assert names(tmp_path / "rank00000")[1:] == ["seg000000.safetensors.zst", "seg000001.safetensors.zst"]


def test_the_manifest_says_how_many_boundaries_are_finished(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        writer.write_manifest(RankManifest(format=1, rank=0, world_size=1))
        append(writer, 0)
        append(writer, 1)
        writer.write_manifest(RankManifest(format=1, rank=0, world_size=1, ended="finished"))
    manifest = Trace.open(tmp_path).ranks[0].manifest
    assert manifest == RankManifest(format=1, rank=0, world_size=1, boundaries=2, ended="finished")


@pytest.mark.parametrize(
    ("boundary", "payload"),
    [
        (boundary_of(1, ONES), bytes(47)),
        (boundary_of(1, ONES, dtype="float7"), ONES.tobytes()),
        (boundary_of(1, ONES, name="a\nb"), ONES.tobytes()),
    ],
)
def test_a_boundary_that_cannot_be_written_leaves_the_rest_intact(
    tmp_path: Path, boundary: object, payload: bytes
) -> None:
    with RankWriter(tmp_path, 0) as writer:
        append(writer, 0)
        with pytest.raises(TraceError):
            writer.append(boundary, payload)
        append(writer, 2, ONES * 2)
    assert [entry.event for entry in Trace.open(tmp_path).ranks[0].entries] == [0, 2]
    assert damage(tmp_path) == []


def test_payloads_of_every_bytes_like_kind_are_taken(tmp_path: Path) -> None:
    raw = ONES.tobytes()
    with RankWriter(tmp_path, 0) as writer:
        for event, payload in enumerate((raw, bytearray(raw), memoryview(raw), ONES, ONES.view(np.uint8))):
            writer.append(boundary_of(event, ONES), payload)
    assert [entry.same_as for entry in Trace.open(tmp_path).ranks[0].entries] == [None, 0, 0, 0, 0]


def test_append_after_close_is_refused(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path, 0)
    writer.close()
    with pytest.raises(TraceError, match="closed"):
        append(writer, 0)


class FullDisk:
    """Stands for ``os.pwrite`` on a disk that takes ``room`` more bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.real = os.pwrite

    def __call__(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        grows = offset + len(data) > os.fstat(descriptor).st_size
        if not grows:
            return self.real(descriptor, data, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.real(descriptor, data[: self.room], offset)
        self.room -= written
        return written

    def vector(self, descriptor: int, parts: list[bytes | memoryview], offset: int) -> int:
        """Stand for ``os.pwritev``."""
        return self(descriptor, b"".join(parts), offset)


def append_until_refused(writer: RankWriter) -> int:
    """Append events from 1 on until the disk is full; return the first that failed."""
    for event in range(1, 100):
        try:
            append(writer, event, np.full(50, event, "<f4"))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return event
            raise
    raise AssertionError("the disk never filled")


@pytest.mark.parametrize("room", [0, 1, 100, 450, 700, 1000, 1500, 2500])
def test_a_full_disk_costs_the_boundary_being_written_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    writer = RankWriter(tmp_path, 0)
    append(writer, 0)
    monkeypatch.setattr(os, "pwrite", FullDisk(room))
    finished = append_until_refused(writer)
    writer.close()
    rank = Trace.open(tmp_path).ranks[0]
    assert [entry.event for entry in rank.entries] == list(range(finished))
    for entry in rank.entries[1:]:
        np.testing.assert_array_equal(rank.read(entry), np.full(50, entry.event, "<f4"))
    assert damage(tmp_path) == []


@pytest.mark.parametrize("room", [0, 5, 100_000, 550_000, 1_200_000, 1_200_300])
def test_a_full_disk_in_a_large_tensor_leaves_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    writer = RankWriter(tmp_path, 0)
    append(writer, 0)
    large = np.random.default_rng(0).standard_normal(300_000).astype("<f4")  # 1,200,000 bytes
    disk = FullDisk(room)
    monkeypatch.setattr(os, "pwrite", disk)
    monkeypatch.setattr(os, "pwritev", disk.vector)
    with pytest.raises(OSError, match="No space left"):
        writer.append(boundary_of(1, large), large, hurried=True)
    monkeypatch.undo()
    writer.close()
    rank = Trace.open(tmp_path).ranks[0]
    assert [entry.event for entry in rank.entries] == [0]
    assert damage(tmp_path) == []


@pytest.mark.parametrize("elements", [1, 15_000, 16_400, 131_072, 300_000, 2_500_000])
def test_tensors_of_every_length_come_back_behind_others(tmp_path: Path, elements: int) -> None:
    arrays = [np.random.default_rng(n).standard_normal(elements + n).astype("<f4") for n in range(3)]
    with RankWriter(tmp_path, 0) as writer:
        for event, array in enumerate(arrays):
            writer.append(boundary_of(event, array), array, hurried=event < 2)
    rank = Trace.open(tmp_path).ranks[0]
    for entry, array in zip(rank.entries, arrays, strict=True):
        np.testing.assert_array_equal(rank.read(entry), array)
    assert damage(tmp_path) == []


@pytest.mark.parametrize("error", [None, OSError(errno.EINVAL, "Invalid argument")])
def test_the_kernel_is_asked_to_let_go_of_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    asked = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        asked.append((os.fstat(descriptor).st_size >> 20, offset, length, advice))
        if error is not None:
            raise error

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(writer_blocks, "_HELD_BYTES", 3 << 20)
    monkeypatch.setattr(writer_blocks, "_open_direct", lambda path: None)
    arrays = [np.full(1 << 18, event, "<f4") + np.arange(1 << 18, dtype="<f4") for event in range(8)]  # 1 MiB
    with RankWriter(tmp_path, 0, compress="none") as writer:
        for event, array in enumerate(arrays):
            writer.append(boundary_of(event, array), array)
    assert asked == [(size, 0, 0, os.POSIX_FADV_DONTNEED) for size in (3, 6)]
    assert damage(tmp_path) == []


def test_a_boundary_of_known_content_needs_no_bytes(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        first = append(writer, 0)
        again = writer.append_known(boundary_of(1, ONES), first.digest, None)
        with pytest.raises(TraceError, match="not known"):
            writer.append_known(boundary_of(2, ONES), "0" * 32, None)
    assert (again.same_as, again.stats, again.blob) == (0, first.stats, None)
    assert damage(tmp_path) == []


def test_a_content_that_occurs_again_is_forgotten_later(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0, dedup=2) as writer:
        for event, factor in enumerate((0, 1, 0, 2)):
            append(writer, event, factor * ONES)
        kept = append(writer, 4, 0 * ONES)
    assert kept.same_as == 0


@pytest.mark.parametrize(
    ("promise", "remembers"),
    [
        (Promise(steps=((0, 3),)), True),
        (Promise(level="stats"), True),
        (Promise(level="sketch"), True),
        (Promise(dedup_replicas=True), False),
    ],
)
def test_contents_count_as_known_only_where_bytes_tell_all(
    tmp_path: Path, promise: Promise, remembers: bool
) -> None:
    with RankWriter(tmp_path, 0, promise=promise) as writer:
        assert bool(writer.remembers) == remembers


def test_a_known_content_of_which_statistics_were_kept_needs_bytes_to_be_kept_in_full(tmp_path: Path) -> None:
    array = np.arange(1000, dtype="<f4")
    like = boundary_of(1, array, kind=Kind.ACTIVATION), boundary_of(2, array, kind=Kind.INPUT)
    with RankWriter(tmp_path, 0, promise=Promise(level="stats")) as writer:
        first = append(writer, 0, array, kind=Kind.ACTIVATION)
        again = writer.append_known(like[0], first.digest, None)
        assert [writer.keeping.held(boundary) for boundary in like] == ["stats", "full"]
        with pytest.raises(TraceError, match="0 bytes"):
            writer.append_known(like[1], first.digest, None)
        stored = writer.append_known(like[1], first.digest, array)
    assert (again.blob, again.same_as, again.stats) == (None, None, first.stats)
    assert stored.blob is not None
    assert damage(tmp_path) == []


def test_a_system_without_vectored_writes_and_advice_gets_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(root: Path) -> dict[str, bytes]:
        writer = RankWriter(root, 0)
        append(writer, 0)
        append(writer, 1, np.arange(4096, dtype="<f4"))
        writer.close()
        return {path.name: path.read_bytes() for path in (root / "rank00000").iterdir()}

    usual = files(tmp_path / "linux")
    monkeypatch.delattr(os, "pwritev")
    monkeypatch.delattr(os, "posix_fadvise")
    assert files(tmp_path / "macos") == usual


def test_what_was_not_finished_is_lost_with_the_process_and_nothing_else(tmp_path: Path) -> None:
    arrays = [np.full(1 << 18, event, "<f4") + np.arange(1 << 18, dtype="<f4") for event in range(7)]  # 1 MiB
    writer = RankWriter(tmp_path, 0, compress="none")
    seen = []
    for event, array in enumerate(arrays):
        given = boundary_of(event, array)
        writer.append_known(given, digest("float32", array.shape, array.view("u1")), array.view("u1"))
        seen.append([entry.event for entry in Trace.open(tmp_path).ranks[0].entries])
    # blocks of 4 MiB: the reserved front and three tensors and most of a fourth fill the first one
    assert seen == [[], [], [], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert writer.boundaries == 3
    writer.flush()
    rank = Trace.open(tmp_path).ranks[0]
    for entry, array in zip(rank.entries, arrays, strict=True):
        np.testing.assert_array_equal(rank.read(entry), array)
    writer.close()
    assert damage(tmp_path) == []


def test_a_disk_that_is_full_once_much_waits_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RankWriter(tmp_path, 0)
    append(writer, 0)
    for event in (1, 2):
        array = np.full(50, event, "<f4")
        found = digest("float32", array.shape, array.view("u1"))
        writer.append_known(boundary_of(event, array), found, array.view("u1"))
    monkeypatch.setattr(os, "pwrite", FullDisk(300))
    with pytest.raises(OSError, match="No space left"):
        writer.flush()
    monkeypatch.undo()
    writer.close()
    assert writer.boundaries == 1
    rank = Trace.open(tmp_path).ranks[0]
    assert [entry.event for entry in rank.entries] == [0]
    np.testing.assert_array_equal(rank.read(rank.entries[0]), ONES)
