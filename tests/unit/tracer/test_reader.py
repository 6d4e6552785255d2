"""A trace is read back: values by dtype, what is missing, and what is no trace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tensortrace.tracer.codec_dtypes import DTYPES
from tensortrace.tracer.errors import BadRequest, DamagedTrace, TraceError, UnsupportedFormat
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Kind
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of, logical_bytes, write_trace

X = np.arange(12, dtype="f4").reshape(3, 4)


def only(root: Path, array: np.ndarray, **fields: Any) -> np.ndarray:
    """Write one tensor and return what is read."""
    rank = Trace.open(write_trace(root, [[(fields, array)]])).ranks[0]
    return rank.read(rank.entries[0])


def read_all(root: Path) -> list[np.ndarray]:
    return [rank.read(entry) for rank in Trace.open(root).ranks for entry in rank.entries]


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (70, 31)])
@pytest.mark.parametrize(
    "dtype",
    [name for name in DTYPES if not name.startswith(("bfloat", "float8", "complex32"))],
)
def test_native_dtypes_come_back_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    array = (
        (rng.standard_normal(shape) * 100 + 1j * rng.standard_normal(shape)).astype(dtype, casting="unsafe")
        if dtype.startswith("complex")
        else np.asarray(rng.standard_normal(shape) * 100).astype(dtype)
    )
    same_bits(only(tmp_path / "t", array), array)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_nan_payloads_infinities_and_signed_zeros_come_back(tmp_path: Path, dtype: str) -> None:
    bits = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45]).astype(dtype)
    for array in (bits.view(dtype), special):
        same_bits(only(tmp_path / str(array.size), array), array)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (64, 40)])
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name.startswith(("bfloat", "float8"))])
def test_narrow_floats_come_back_as_exact_float32(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    storage = "u2" if dtype == "bfloat16" else "u1"
    codes = np.asarray(np.random.default_rng(2).integers(0, 1 << 8 * int(storage[1]), shape)).astype(storage)
    signed = torch.from_numpy(codes.view("i2") if storage == "u2" else codes)
    expected = signed.view(getattr(torch, dtype)).float().numpy()
    found = only(tmp_path / "t", codes, dtype=dtype)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_raw_bytes_are_the_logical_bytes(tmp_path: Path) -> None:
    rank = Trace.open(write_trace(tmp_path / "t", [[({"dtype": "bfloat16"}, X)]])).ranks[0]
    assert rank.read_bytes(rank.entries[0]).tobytes() == logical_bytes(X, "bfloat16").tobytes()


def test_entries_come_in_order_of_their_events_and_duplicates_of_a_key_are_kept(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        for event in (2, 0, 1):
            writer.append(boundary_of(event, X), X)
    rank = Trace.open(tmp_path).ranks[0]
    assert [entry.event for entry in rank.entries] == [0, 1, 2]
    assert len({entry.key for entry in rank.entries}) == 1
    assert [rank.stored(entry) for entry in rank.entries] == [True] * 3
    same_bits(rank.read(rank.entries[0]), X)


def test_a_whole_trace_has_no_problems(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", [[({"name": f"m.{i}"}, X + i) for i in range(5)]] * 2)
    with Trace.open(tmp_path / "t") as trace:
        assert trace.problems == ()
        assert [rank.rank for rank in trace.ranks] == [0, 1]
        assert trace.manifest is not None
        assert trace.manifest.exit_code == 0
    assert list(check(tmp_path / "t")) == []


def test_the_last_attempt_of_a_rank_counts(tmp_path: Path) -> None:
    for rank, attempt, value in ((0, 0, 1.0), (0, 2, 2.0), (1, 0, 3.0)):
        with RankWriter(tmp_path, rank, attempt=attempt) as writer:
            writer.append(boundary_of(0, X), X * np.float32(value))
    trace = Trace.open(tmp_path)
    assert [(rank.rank, rank.attempt) for rank in trace.ranks] == [(0, 2), (1, 0)]
    same_bits(trace.ranks[0].read(trace.ranks[0].entries[0]), X * np.float32(2))
    assert any("rank00001: attempt 0, though others are at attempt 2" in text for text in trace.problems)


def test_missing_ranks_and_early_ends_are_said(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]] * 4, ended="failed: disk full")
    shutil.rmtree(root / "rank00001")
    shutil.rmtree(root / "rank00003")
    problems = "\n".join(Trace.open(root).problems)
    assert "2 of 4 ranks left no folder: 1, 3" in problems
    assert "rank00000: the rank ended early (failed: disk full)" in problems
    assert "lists 'rank00003', which is missing" in problems


def test_rank_folders_alone_are_enough(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    (root / "trace.json").unlink()
    (root / "rank00000" / "rank.json").unlink()
    trace = Trace.open(root)
    same_bits(trace.ranks[0].read(trace.ranks[0].entries[0]), X)
    assert len(trace.problems) == 2


@pytest.mark.parametrize("finish", [True, False])
def test_a_lost_index_is_rebuilt_from_the_segments(tmp_path: Path, finish: bool) -> None:
    tensors = [({"name": f"m.{i}"}, X * (i // 2)) for i in range(6)]
    whole = Trace.open(write_trace(tmp_path / "a", [tensors], finish=finish)).ranks[0]
    root = write_trace(tmp_path / "b", [tensors], finish=finish)
    next((root / "rank00000").glob("index.jsonl*")).unlink()
    trace = Trace.open(root)
    assert trace.ranks[0].entries == whole.entries
    same_bits(trace.ranks[0].read(trace.ranks[0].entries[5]), X * 2)
    assert any("no index; rebuilt" in problem for problem in trace.problems)


def test_open_segments_are_read_while_the_writer_is_at_work(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        writer.append(boundary_of(0, X), X)
        trace = Trace.open(tmp_path)
        same_bits(trace.ranks[0].read(trace.ranks[0].entries[0]), X)
        writer.append(boundary_of(1, X), X + np.float32(1))
        assert len(Trace.open(tmp_path).ranks[0].entries) == 2
    same_bits(trace.ranks[0].read(trace.ranks[0].entries[0]), X)  # sealed meanwhile


def test_a_missing_segment_is_a_problem_and_its_tensors_are_not_stored(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X), ({"slot": "b"}, X)]])
    (root / "rank00000" / "seg000000.safetensors.zst").unlink()
    trace = Trace.open(root)
    rank = trace.ranks[0]
    assert any("seg000000.safetensors.zst: missing or cut off; 1 tensors" in text for text in trace.problems)
    assert [rank.stored(entry) for entry in rank.entries] == [False, False]
    with pytest.raises(DamagedTrace, match="the segment is missing"):
        rank.read(rank.entries[1])


def test_digest_only_entries_say_so(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    rank = Trace.open(root).ranks[0]
    bare = msgspec.structs.replace(rank.entries[0], blob=None)
    assert not rank.stored(bare)
    with pytest.raises(TraceError, match="only digest and statistics"):
        rank.read(bare)


def test_a_tensor_beyond_the_limit_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    rank = Trace.open(root, limit_bytes=47).ranks[0]
    with pytest.raises(TraceError, match="48 bytes, expected at most 47; raise limit_bytes"):
        rank.read(rank.entries[0])


def test_what_is_no_trace_gives_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no such folder"):
        Trace.open(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DamagedTrace, match="not a trace"):
        Trace.open(tmp_path)
    with pytest.raises(DamagedTrace, match="not a trace"):
        Trace.open(tmp_path / "notes.txt")
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(DamagedTrace, match=r"trace\.json: format is None"):
        Trace.open(tmp_path)


def test_a_trace_of_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    (root / "trace.json").write_text('{"format": 7}')
    with pytest.raises(UnsupportedFormat, match=r"trace\.json.*format 7.*at most 4"):
        Trace.open(root)


def test_a_rank_folder_with_another_ranks_manifest_is_refused(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]] * 2)
    shutil.copy(root / "rank00001" / "rank.json", root / "rank00000" / "rank.json")
    with pytest.raises(DamagedTrace, match="found rank 1, attempt 0, expected rank 0"):
        Trace.open(root)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    for name in ("rank000000", "rank00007.r0", "rank00008.bak", "rank\u0660\u0660\u0660\u0660\u0669"):
        (root / name).mkdir()
    (root / "rank00009").write_text("a file")
    assert [rank.rank for rank in Trace.open(root).ranks] == [0]


@pytest.mark.parametrize("name", ["index.jsonl", "rank.json", "seg000000.safetensors.zst"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    path = root / "rank00000" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedTrace, match="not a regular file"):
        read_all(root)


def test_a_bad_line_is_refused_by_default_and_mended_from_the_segments_when_salvaging(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({"name": f"m.{i}"}, X + i) for i in range(4)]])
    whole = Trace.open(root).ranks[0].entries
    index = root / "rank00000" / "index.jsonl"
    data = bytearray(index.read_bytes())
    second = data.index(b"\n") + 1
    data[second + 5] ^= 1
    index.write_bytes(data)
    with pytest.raises(DamagedTrace, match=f"index.jsonl: offset {second}: index line with a wrong checksum"):
        Trace.open(root)
    trace = Trace.open(root, on_damage="salvage")
    assert trace.ranks[0].entries == whole
    assert any("wrong checksum" in problem for problem in trace.problems)


def test_salvaging_steps_over_a_damaged_place_in_a_segment(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({"name": f"m.{i}"}, X + i) for i in range(4)]])
    rank = Trace.open(root).ranks[0]
    (root / "rank00000" / "index.jsonl").unlink()
    segment = root / "rank00000" / "seg000000.safetensors.zst"
    data = bytearray(segment.read_bytes())
    assert rank.entries[1].blob is not None
    data[rank.entries[1].blob.offset] ^= 1  # no frame begins there any more
    segment.write_bytes(data)
    with pytest.raises(DamagedTrace, match=f"offset {rank.entries[1].blob.offset}: no frame begins here"):
        Trace.open(root)
    found = Trace.open(root, on_damage="salvage").ranks[0]
    assert found.entries == rank.entries
    same_bits(found.read(found.entries[3]), X + np.float32(3))
    with pytest.raises(DamagedTrace):
        found.read(found.entries[1])


def test_check_tells_a_lost_segment_once_whatever_it_held(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({"name": f"m.{i}"}, X + i) for i in range(4)]])
    (root / "rank00000" / "seg000000.safetensors.zst").unlink()
    [told] = [problem for problem in check(root) if "seg000000" in problem]
    assert told.endswith("missing or cut off; 4 tensors are lost")


def test_check_names_a_segment_that_nobody_refers_to(tmp_path: Path) -> None:
    root = write_trace(tmp_path / "t", [[({}, X)]])
    other = write_trace(tmp_path / "o", [[({}, X + 1)]])
    shutil.copy(
        other / "rank00000" / "seg000000.safetensors.zst", root / "rank00000" / "seg000001.safetensors.zst"
    )
    assert any("seg000001" in problem for problem in check(root))


def test_kinds_and_pseudo_steps_come_back(tmp_path: Path) -> None:
    fields = {"step": -1, "microbatch": None, "kind": Kind.OPTIMIZER_STATE, "name": "w", "slot": "exp_avg"}
    entry = Trace.open(write_trace(tmp_path / "t", [[(fields, X)]])).ranks[0].entries[0]
    assert entry.key == (-1, None, Kind.OPTIMIZER_STATE, "w", "exp_avg", 0)
