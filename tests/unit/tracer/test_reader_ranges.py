"""Ranges of a stored tensor are what the whole tensor holds there, checked, in little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer import codec, layout, reader_ranges, reader_segment
from tensortrace.tracer.codec import FRAME_BYTES, stored_frame, stored_parts
from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_memory import take
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.reader_segment import open_segment, stored_blob
from tensortrace.tracer.types import Blob
from tests.synthetic import logical_bytes, write_trace


def stored(folder: Path, array: np.ndarray, dtype: str | None = None) -> RankTrace:
    fields = {} if dtype is None else {"dtype": dtype}
    return Trace.open(write_trace(folder, [[(fields, array)]])).ranks[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "complex128", "bool"])
@pytest.mark.parametrize("size", [7, 5000, 4_500_000])  # in one frame, in planes, in several frames each
def test_any_range_is_what_the_whole_tensor_holds_there(tmp_path: Path, dtype: str, size: int) -> None:
    rng = np.random.default_rng(size)
    native = "float32" if dtype == "bfloat16" else dtype
    array = (rng.normal(size=size) * 100).astype(native)
    rank = Trace.open(write_trace(tmp_path / "t", [[({"dtype": dtype}, _coded(array, dtype))]])).ranks[0]
    entry = rank.entries[0]
    whole = rank.read(entry)
    for start, stop in ((0, size), (0, 0), (size - 1, size), (size // 3, 2 * size // 3), (5, 6)):
        found = rank.read_range(entry, start, stop)
        assert found.dtype == whole.dtype
        assert found.tobytes() == whole[start:stop].tobytes()


def _coded(array: np.ndarray, dtype: str) -> np.ndarray:
    return logical_bytes(array, dtype).view("<u2") if dtype == "bfloat16" else array


def test_blocks_follow_the_grid_and_hold_the_tensor(tmp_path: Path) -> None:
    array = np.arange(3 * 40 * 50, dtype=np.float32).reshape(3, 40, 50)
    rank = stored(tmp_path / "t", array)
    for most in (1, 49, 500, 3000, 10_000):
        found = list(rank.blocks(rank.entries[0], most))
        assert [b.shape for b in found] == [shape for _, shape in block_grid(array.shape, most)]
        np.testing.assert_array_equal(np.concatenate([b.ravel() for b in found]), array.ravel())


def test_elements_beyond_the_tensor_are_refused(tmp_path: Path) -> None:
    rank = stored(tmp_path / "t", np.zeros(3, np.float32))
    for start, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(ValueError, match="of 3"):
            rank.read_range(rank.entries[0], start, stop)


def test_a_range_of_a_tensor_with_another_digest_is_never_returned(tmp_path: Path) -> None:
    array = np.zeros(1_000_000, np.uint8)  # stored raw: a flipped byte in the middle of a raw block
    array[::2] = np.random.default_rng(0).integers(0, 255, 500_000)
    folder = write_trace(tmp_path / "t", [[({}, array)]])
    path = next((layout.rank_folder(folder, 0)).glob("seg*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    rank = Trace.open(folder).ranks[0]
    with pytest.raises(DamagedTrace, match=r"seg000000.*offset"):
        rank.read_range(rank.entries[0], 0, 1)  # though the first frame is whole


@pytest.mark.parametrize("size", [100_000, 4_500_000])  # in one frame, in several
def test_a_tensor_that_the_writer_stored_raw_is_read_without_walking_its_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    rank = stored(tmp_path / "t", array)
    monkeypatch.setattr(reader_segment, "blob_frames", None)
    monkeypatch.setattr(reader_ranges, "blob_frames", None)
    np.testing.assert_array_equal(rank.read(rank.entries[0]), array)
    np.testing.assert_array_equal(rank.read_range(rank.entries[0], 5, size - 7), array[5 : size - 7])


def test_lengths_that_the_file_cannot_have_are_not_gone_through() -> None:
    assert codec.stored_contents(1 << 60, 1 << 20) is None


def test_a_tensor_of_which_only_the_digest_was_kept_has_no_ranges(tmp_path: Path) -> None:
    rank = stored(tmp_path / "t", np.zeros(3, np.float32))
    bare = rank.entries[0]
    with pytest.raises(TraceError, match="only digest and statistics"):
        rank.read_range(replace(bare, blob=None), 0, 1)


def test_reading_block_by_block_takes_a_fraction_of_the_tensor(tmp_path: Path) -> None:
    array = np.tile(np.arange(1 << 16, dtype=np.float32), 1 << 10)  # 256 MiB
    rank = stored(tmp_path / "t", array)
    total = float(array[: 1 << 16].astype(np.float64).sum()) * (1 << 10)
    del array
    tracemalloc.start()
    found = sum(float(b.astype(np.float64).sum()) for b in rank.blocks(rank.entries[0], 1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == total
    assert peak < 64 << 20  # a frame of each plane while the digest is checked, then a few blocks


def test_going_through_a_tensor_gives_its_blocks(tmp_path: Path) -> None:
    rank = stored(tmp_path / "t", np.random.default_rng(0).normal(size=(30, 700)).astype(np.float32))
    entry = rank.entries[0]
    for most in (1000, 21_000):
        found, blocks = list(rank.through(entry, most)), list(rank.blocks(entry, most))
        assert [b.shape for b in found] == [b.shape for b in blocks]
        assert all(np.array_equal(x, y) for x, y in zip(found, blocks, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_going_through_planes_in_whole_blocks_gives_the_tensor(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(0).normal(size=2_500_000).astype(np.float32)
    folder = write_trace(tmp_path / "t", [[({"dtype": dtype}, array)]])
    rank = Trace.open(folder).ranks[0]
    assert rank.entries[0].blob is not None
    assert rank.entries[0].blob.codec == "planes"
    expected = logical_bytes(array, dtype).view("<u4" if dtype == "float32" else "<u2").astype("<u4")
    found = np.concatenate(list(rank.through(rank.entries[0], 1 << 20)))
    np.testing.assert_array_equal(found.view("<u4"), expected << (16 if dtype == "bfloat16" else 0))


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("size", [1, 128 << 10, (128 << 10) + 1, FRAME_BYTES, FRAME_BYTES + 5])
def test_what_is_stored_raw_is_found_without_walking_it(tmp_path: Path, size: int, checksums: bool) -> None:
    """As the writer stores it now, and with the checksums that it wrote before."""
    raw = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    pieces = [raw[start : start + FRAME_BYTES].data for start in range(0, size, FRAME_BYTES)]
    frames = [stored_frame(p) if checksums else b"".join(stored_parts(p)) for p in pieces]
    path = tmp_path / "seg"
    path.write_bytes(b"before" + b"".join(frames) + b"behind")
    blob = Blob(segment=0, offset=6, length=sum(map(len, frames)), raw_length=size, codec="raw")
    with open_segment(path) as segment:
        found = stored_blob(segment, blob)
    assert found is not None
    np.testing.assert_array_equal(found, raw)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    first = take(1 << 20)
    first[:] = 7
    at, part = first.ctypes.data, first[5:9].view("<u4")
    del first
    assert take(1 << 20).ctypes.data != at
    assert part[0] == 0x07070707
    del part
    assert take(1 << 20).ctypes.data == at


_HEAD, _BLOCK = 9, 128 << 10


@pytest.mark.parametrize(
    "offset",
    [0, 4, 5, _HEAD, _HEAD + 2, _HEAD + 3, _HEAD + 3 + _BLOCK, _HEAD + 3 + _BLOCK + 2, 1_500_000],
    ids=["magic", "descriptor", "size", "header", "header's end", "first", "next header", "its end", "later"],
)
def test_a_flipped_bit_of_what_is_stored_raw_is_found_however_it_is_read(tmp_path: Path, offset: int) -> None:
    """In the headers of a frame and of its blocks, which are read with the bytes, and in the bytes."""
    array = np.random.default_rng(0).integers(0, 255, 5_000_000, np.uint8)
    folder = write_trace(tmp_path / "t", [[({}, array)]])
    path = next(layout.rank_folder(folder, 0).glob("seg*"))
    blob = Trace.open(folder).ranks[0].entries[0].blob
    assert blob is not None
    assert blob.codec == "raw"
    data = bytearray(path.read_bytes())
    data[blob.offset + offset] ^= 1
    path.write_bytes(data)
    for read in (
        lambda rank, entry: rank.read(entry),
        lambda rank, entry: rank.read_range(entry, 4_999_000, 5_000_000),
        lambda rank, entry: list(rank.through(entry, 1 << 20)),
    ):
        rank = Trace.open(folder).ranks[0]
        with pytest.raises(DamagedTrace):
            read(rank, rank.entries[0])
