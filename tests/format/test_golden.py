"""The traces that every release wrote stay readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.codec_dtypes import DTYPES, dtype_of, values
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Kind

GOLDEN = Path(__file__).parent / "golden" / "v1"
EVENTS = 8 + 21
"""Eight boundaries of every sort, then one per dtype of format 1."""


def test_the_finished_trace_is_whole() -> None:
    trace = Trace.open(GOLDEN / "finished")
    assert trace.problems == ()
    assert [len(rank.entries) for rank in trace.ranks] == [EVENTS, EVENTS]
    assert list(check(GOLDEN / "finished")) == []


def test_the_killed_trace_gives_what_was_finished() -> None:
    trace = Trace.open(GOLDEN / "killed")
    assert len(trace.ranks[0].entries) == EVENTS - 1
    assert any("torn" in problem for problem in trace.problems)
    salvaged = Trace.open(GOLDEN / "killed", on_damage="salvage")
    assert len(salvaged.ranks[0].entries) == EVENTS


@pytest.mark.parametrize("rank", [0, 1])
def test_values_and_shards_are_as_when_they_were_written(rank: int) -> None:
    opened = Trace.open(GOLDEN / "finished").ranks[rank]
    entries = opened.entries
    weight = np.array(
        [[0.25 * (40 * row + column) + rank for column in range(40)] for row in range(45)], "f4"
    )
    expected = [weight, np.arange(12).reshape(3, 4), weight[:2] * 2, weight[:2] * 2, weight * 0, weight]
    for entry, array in zip(entries, expected, strict=False):
        np.testing.assert_array_equal(opened.read(entry), array)
    assert np.isnan(opened.read(entries[6]))
    assert opened.read(entries[7]).shape == (0, 5)
    assert [entry.same_as for entry in entries[:6]] == [None, None, None, 2, None, 0]
    for event in (0, 4, 5):
        shard = entries[event].shard
        assert shard is not None
        assert (shard.mesh, shard.coordinate, shard.global_shape) == ("dp_tp", (0, rank), (90, 40))
        assert shard.boxes[0].offset == (45 * rank, 0)
    assert entries[0].key == (-1, None, Kind.PARAM, "fc.weight", "model", 0)
    assert (entries[2].producers, entries[2].meta.source) == ((1,), "train.py:7")
    assert (entries[3].recompute, entries[7].name) == (True, "odd/%name é")


@pytest.mark.parametrize("position", range(21))
def test_every_dtype_is_as_when_it_was_written(position: int) -> None:
    opened = Trace.open(GOLDEN / "finished").ranks[0]
    entry = opened.entries[8 + position]
    itemsize = dtype_of(entry.dtype).itemsize
    raw = np.array([index * 7 % 251 for index in range(600 * itemsize)], "u1")
    if entry.dtype == "bool":
        raw %= 2
    assert opened.read_bytes(entry).tobytes() == raw.tobytes()
    np.testing.assert_array_equal(opened.read(entry), values(entry.dtype, raw).reshape(30, 20))


def test_no_dtype_of_format_1_was_forgotten() -> None:
    opened = Trace.open(GOLDEN / "finished").ranks[0]
    assert {entry.dtype for entry in opened.entries[8:]} <= set(DTYPES)
    assert len({entry.dtype for entry in opened.entries[8:]}) == 21


def test_operations_are_as_when_they_were_written() -> None:
    root = GOLDEN.parent / "v2" / "finished"
    assert list(check(root)) == []
    trace = Trace.open(root)
    [rank] = trace.ranks
    given, made, end, gradient = rank.entries
    assert rank.manifest is not None
    assert (rank.manifest.format, rank.manifest.promise.zoom) == (2, ("blocks.1.attn",))
    assert (made.kind, gradient.kind) == (Kind.OPERATION, Kind.OPERATION_GRAD)
    assert made.slot == gradient.slot == "00000.mul.out"
    assert made.meta.arguments == ("self=00000.mul.in.0 float32[2,3]", "other=0.125")
    assert (end.slot, end.local_shape, end.producers) == ("00001.return.none", (0,), (made.event,))
    np.testing.assert_array_equal(rank.read(made), rank.read(given) / 8)


def test_a_window_is_as_when_it_was_written() -> None:
    [rank] = Trace.open(GOLDEN.parent / "v4" / "window").ranks
    assert rank.manifest is not None
    window = rank.manifest.window
    assert window is not None
    assert window.triggered is not None
    assert (rank.manifest.format, window.first, window.last) == (4, 1, 2)
    assert (window.triggered.step, window.triggered.name, window.triggered.event) == (2, "w", 4)
    assert [(entry.step, entry.slot) for entry in rank.entries] == [
        (0, "model"), (0, "again"), (1, "model"), (1, "again"), (2, "model"), (2, "again"),
    ]  # fmt: skip
    np.testing.assert_array_equal(rank.read(rank.entries[3]), np.ones((2, 3)))
    assert rank.problems == ()


def test_the_levels_of_version_3_are_as_when_they_were_written() -> None:
    folder = GOLDEN.parent / "v3" / "levels"
    trace = Trace.open(folder)
    assert trace.problems == ()
    assert list(check(folder)) == []
    for rank in trace.ranks:
        assert [e.sketch is not None for e in rank.entries] == [True, True, True, False] + [True] * 4 + [
            False
        ]
        assert [rank.stored(e) for e in rank.entries] == [False] * 3 + [True] + [False] * 5
    assert trace.manifest is not None
    assert (trace.manifest.format, trace.manifest.promise.level) == (3, "sketch")
    assert [rule.level for rule in trace.manifest.promise.levels] == ["stats", "full"]


def test_copies_that_one_rank_stores_are_as_when_they_were_written() -> None:
    root = GOLDEN.parent / "v4" / "copies"
    assert list(check(root)) == []
    first, second = Trace.open(root).ranks
    assert second.manifest is not None
    assert (second.manifest.format, second.manifest.promise.dedup_replicas) == (4, True)
    assert (first.entries[0].blob is None, second.entries[0].blob) == (False, None)
    np.testing.assert_array_equal(second.read(second.entries[0]), np.arange(6).reshape(2, 3))
