"""Traces made to harm: bombs, lies about sizes, names that are paths. One error, little memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from tensortrace.tracer.codec import FRAME_BYTES, RECORD_MAGIC, skippable_frame, stored_frame
from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.reader import Trace, check
from tests.synthetic import write_trace

X = np.arange(300, dtype="f4")
ZEROS_4_MIB = zstandard.ZstdCompressor().compress(bytes(FRAME_BYTES))
MOST_BYTES = 32 << 20


def forge(root: Path, frames: bytes, **fields: Any) -> Path:
    """Write a trace, then put other frames in its segment and an index line that describes them."""
    write_trace(root, [[({}, X)]])
    segment = root / "rank00000" / "seg000000.safetensors.zst"
    index = root / "rank00000" / "index.jsonl"
    start = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(frames)
    line = msgspec.json.decode(index.read_bytes().partition(b"\t")[0])
    shape = fields.pop("local_shape", [300])
    blob = {"segment": 0, "offset": start, "length": len(frames), "raw_length": 4 * shape[0], "codec": "raw"}
    line |= {"local_shape": shape, "blob": blob | fields.pop("blob", {})} | fields
    text = msgspec.json.encode(line)
    index.write_bytes(text + b"\t" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n")
    return root


def read_first(root: Path, **options: Any) -> np.ndarray:
    rank = Trace.open(root, **options).ranks[0]
    return rank.read(rank.entries[0])


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(root: Path, text: str, **options: Any) -> None:
    """Expect one DamagedTrace that names segment and offset, for little memory."""

    def read() -> None:
        with pytest.raises(TraceError, match=text) as caught:
            read_first(root, **options)
        assert "seg000000.safetensors.zst" in str(caught.value)

    assert peak_bytes(read) < MOST_BYTES
    assert any("seg000000" in problem for problem in check(root, **options))


def test_a_frame_that_states_a_gibibyte_is_refused(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    refused(forge(tmp_path / "t", bomb), r"offset \d+: the frame states 268435456 raw bytes")


def test_a_frame_that_states_no_size_is_refused(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=False)
    bomb = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(64 << 20))
    refused(forge(tmp_path / "t", bomb), "states no content size")


def test_many_frames_beyond_the_index_are_refused_before_any_is_decompressed(tmp_path: Path) -> None:
    refused(forge(tmp_path / "t", ZEROS_4_MIB * 64), r"hold 268435456.*hold 1200")


def test_an_index_that_promises_more_than_the_frames_hold_allocates_nothing(tmp_path: Path) -> None:
    root = forge(tmp_path / "t", stored_frame(X.tobytes()), local_shape=[1 << 30])
    refused(root, "hold 1200, the index says")


def test_a_well_formed_bomb_stops_at_the_readers_limit(tmp_path: Path) -> None:
    root = forge(tmp_path / "t", ZEROS_4_MIB * 64, local_shape=[64 << 20])
    refused(root, "268435456 bytes, expected at most 1048576", limit_bytes=1 << 20)


def test_a_frame_that_holds_more_than_it_states_is_refused(tmp_path: Path) -> None:
    honest = zstandard.ZstdCompressor().compress(bytes(100_000))
    lying = bytearray(honest)
    assert struct.unpack_from("<I", honest, 5) == (100_000,)
    struct.pack_into("<I", lying, 5, 1200)
    refused(forge(tmp_path / "t", bytes(lying)), "does not decompress")


def test_a_skippable_frame_inside_a_tensor_is_refused(tmp_path: Path) -> None:
    frames = skippable_frame(RECORD_MAGIC, b"x") + stored_frame(X.tobytes())
    refused(forge(tmp_path / "t", frames), "skippable frame stands inside")


def test_a_frame_with_a_dictionary_is_refused(tmp_path: Path) -> None:
    dictionary = zstandard.ZstdCompressionDict(bytes(range(256)) * 8)
    frames = zstandard.ZstdCompressor(dict_data=dictionary).compress(X.tobytes())
    with_id = bytearray(frames)
    with_id[4] |= 1
    refused(forge(tmp_path / "t", bytes(with_id)), "dictionary")


def test_right_frames_of_wrong_data_are_refused_by_digest(tmp_path: Path) -> None:
    refused(forge(tmp_path / "t", stored_frame((X + 1).tobytes())), "another digest")


def test_a_blob_beyond_the_file_is_refused(tmp_path: Path) -> None:
    refused(forge(tmp_path / "t", b"", blob={"length": 1 << 40}), "the file ends before the tensor")


def test_a_blob_of_another_tensor_is_refused(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X), ({"name": "b"}, X + 1)]])
    rank = Trace.open(root).ranks[0]
    swapped = msgspec.structs.replace(rank.entries[0], blob=rank.entries[1].blob)
    with pytest.raises(DamagedTrace, match="another digest"):
        rank.read(swapped)


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "..", "a/../../b", "C:\\x", "a" * 4096]
)
def test_names_are_never_paths(tmp_path: Path, name: str) -> None:
    before = {path for path in tmp_path.rglob("*")}
    root = write_trace(tmp_path / "t", [[({"name": name, "slot": name}, X)]])
    entry = Trace.open(root).ranks[0].entries[0]
    assert (entry.name, entry.slot) == (name, name)
    np.testing.assert_array_equal(read_first(root), X)
    assert list(check(root)) == []
    assert {path for path in tmp_path.rglob("*")} - before == {root, *root.rglob("*")}


@pytest.mark.parametrize("name", ["../../etc", "/etc", "..", "rank00000/../../x"])
def test_a_listed_folder_that_is_a_path_is_not_followed(tmp_path: Path, name: str) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    manifest = msgspec.json.decode((root / "trace.json").read_bytes()) | {"ranks": [name]}
    (root / "trace.json").write_bytes(msgspec.json.encode(manifest))
    assert any(f"lists {name!r}, which is missing" in problem for problem in Trace.open(root).problems)


def test_an_endless_line_is_read_to_its_limit_only(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    with (root / "rank00000" / "index.jsonl").open("r+b") as file:
        file.truncate(1 << 36)  # sparse zeros without a newline
    with pytest.raises(DamagedTrace, match=r"index\.jsonl: offset \d+: index line of more than"):
        Trace.open(root)


def test_events_that_occur_twice_or_refer_forward_are_refused(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X), ({"slot": "b"}, X)]])
    index = root / "rank00000" / "index.jsonl"
    first, second = index.read_bytes().splitlines(keepends=True)
    for lines, text in (
        (first + first, "event 0: occurs twice"),
        (second + first, "event 1: same_as 0 is no earlier tensor"),
    ):
        index.write_bytes(lines)
        with pytest.raises(DamagedTrace, match=text):
            Trace.open(root)


def test_a_million_dimensions_or_entries_in_a_line_cost_little(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    index = root / "rank00000" / "index.jsonl"
    line = msgspec.json.decode(index.read_bytes().partition(b"\t")[0]) | {"local_shape": [1] * 1_000_000}
    text = msgspec.json.encode(line)
    index.write_bytes(text + b"\t" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n")
    with pytest.raises(DamagedTrace, match="local_shape is 1000000 dimensions"):
        Trace.open(root)
