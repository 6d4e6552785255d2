"""Damage of every kind to a small trace: an error, a named problem or equal data, never wrong data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensortrace.tracer import writer as writer_module
from tensortrace.tracer.codec import FILLER_MAGIC
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.reader_index import OnDamage
from tensortrace.tracer.types import Entry, Kind, Placement, Shard
from tests.synthetic import write_trace

RESERVED = 8192  # instead of 256 KiB, so that every byte behind it can be damaged in turn
SHARD = Shard(mesh="ddp", coordinate=(0,), placements=(Placement("replicate"),), global_shape=(3, 4))
NORMAL = np.random.default_rng(0).standard_normal((3, 4)).astype("f4")
PATTERN = (np.arange(1200) % 7 - 3).astype("f4").reshape(40, 30)
TENSORS = [
    ({"name": "w", "kind": Kind.PARAM, "shard": SHARD}, NORMAL),
    ({"name": "planes"}, PATTERN),
    ({"name": "planes", "slot": "again", "shard": SHARD}, PATTERN),
    ({"name": "half", "dtype": "bfloat16"}, PATTERN.reshape(-1)),
    ({"name": "ids"}, np.arange(20)),
    ({"name": "none"}, np.zeros((0, 2), "f4")),
]


class Whole:
    """The undamaged trace and what is in it."""

    def __init__(self, root: Path, finished: bool) -> None:
        self.root = root
        rank = Trace.open(root).ranks[0]
        self.entries = {entry.event: entry for entry in rank.entries}
        self.bytes = {entry.event: rank.read_bytes(entry).tobytes() for entry in rank.entries}
        self.killed = not finished
        self.usual_problems = 0 if finished else 2  # the launcher's and the rank's manifest
        self.index = next((root / "rank00000").glob("index.jsonl*"))
        self.segment = next((root / "rank00000").glob("seg*"))


@pytest.fixture(scope="module", params=["finished", "killed"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "RESERVED_BYTES", RESERVED)
        root = tmp_path_factory.mktemp("whole") / "trace"
        finished = request.param == "finished"
        return Whole(write_trace(root, [TENSORS], finish=finished), finished)


@pytest.fixture
def copy(whole: Whole, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole.root, tmp_path / "copy")) / "rank00000"


def outcome(root: Path, whole: Whole, on_damage: OnDamage = "refuse") -> str:
    """Open and read everything, fail on wrong data, and say how it went.

    ``equal``: all is there. ``error``: one was raised, naming the place. ``problem``: something is
    missing, and a problem more than usual says so. ``short``: something is missing and nothing says so.
    """
    try:
        trace = Trace.open(root, on_damage=on_damage)
        rank = trace.ranks[0]
        for entry in rank.entries:
            assert entry == whole.entries[entry.event], "an entry says something else"
            assert rank.read_bytes(entry).tobytes() == whole.bytes[entry.event], "a tensor has other bytes"
    except TraceError as error:
        return "error" if str(root) in str(error) else "an error that names no file"
    if len(rank.entries) == len(whole.entries):
        return "equal"
    return "problem" if len(trace.problems) > whole.usual_problems else "short"


def flips(path: Path, start: int, end: int | None = None, step: int = 1) -> Iterator[int]:
    """Flip one bit of each ``step``-th byte in turn, write the file, yield the offset."""
    data = path.read_bytes()
    for offset in range(start, len(data) if end is None else end, step):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset * 5 % 8
        path.write_bytes(flipped)
        yield offset
    path.write_bytes(data)


def test_every_flipped_byte_of_the_index_is_noticed(whole: Whole, copy: Path) -> None:
    for offset in flips(copy / whole.index.name, 0):
        assert outcome(copy.parent, whole) in ("error", "problem"), offset


def test_salvaging_mends_every_flipped_byte_of_the_index(whole: Whole, copy: Path) -> None:
    for offset in flips(copy / whole.index.name, 0, step=3):
        assert outcome(copy.parent, whole, "salvage") == "equal", offset


def test_no_flipped_byte_of_a_segment_gives_other_data(whole: Whole, copy: Path) -> None:
    outcomes = [outcome(copy.parent, whole) for _ in flips(copy / whole.segment.name, RESERVED)]
    assert set(outcomes) == {"error", "equal"}  # a record is read only on need


def test_check_finds_every_flipped_byte_that_matters(whole: Whole, copy: Path) -> None:
    usual = list(check(copy.parent))
    header = whole.segment.read_bytes().index(FILLER_MAGIC.to_bytes(4, "little")) + 8
    for start, end, step in ((0, header, 1), (header, RESERVED, 97), (RESERVED, None, 3)):
        for offset in flips(copy / whole.segment.name, start, end, step):
            if list(check(copy.parent)) == usual:  # other bytes of a frame that mean the same
                assert outcome(copy.parent, whole) == "equal", offset
                assert zstandard_equal(whole.segment, copy / whole.segment.name), offset


def zstandard_equal(*paths: Path) -> bool:
    contents = []
    for path in paths:
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            contents.append(reader.read())
    return contents[0] == contents[1]


@pytest.mark.parametrize("on_damage", ["refuse", "salvage"])
def test_no_flipped_byte_gives_other_data_without_an_index(
    whole: Whole, copy: Path, on_damage: OnDamage
) -> None:
    (copy / whole.index.name).unlink()
    outcomes = [
        outcome(copy.parent, whole, on_damage) for _ in flips(copy / whole.segment.name, RESERVED, step=2)
    ]
    assert "short" not in outcomes
    assert "error" in outcomes


def test_every_cut_of_the_index_is_noticed(whole: Whole, copy: Path) -> None:
    path = copy / whole.index.name
    data = path.read_bytes()
    between_lines = {0} | {offset + 1 for offset, byte in enumerate(data) if byte == 0x0A}
    for size in range(len(data)):
        path.write_bytes(data[:size])
        # A killed rank's index that ends between lines is one that was killed a moment earlier.
        silent = whole.killed and size in between_lines
        assert outcome(copy.parent, whole) == ("short" if silent else "problem"), size


def test_no_cut_of_a_segment_gives_other_data(whole: Whole, copy: Path) -> None:
    path = copy / whole.segment.name
    data = path.read_bytes()
    last = max(_end(entry) for entry in whole.entries.values())
    for size in [0, 1, 7, 8, 100, *range(RESERVED, len(data), 2)]:
        path.write_bytes(data[:size])
        assert outcome(copy.parent, whole) == ("error" if size < last else "equal")
        problems = Trace.open(copy.parent).problems
        assert any("missing or cut off" in problem for problem in problems) == (size < last)


def test_a_cut_segment_without_index_gives_its_whole_boundaries(whole: Whole, copy: Path) -> None:
    (copy / whole.index.name).unlink()
    path = copy / whole.segment.name
    data = path.read_bytes()
    for size in range(RESERVED, len(data), 5):
        path.write_bytes(data[:size])
        assert outcome(copy.parent, whole, "salvage") == "problem"


def _end(entry: Entry) -> int:
    return entry.blob.offset + entry.blob.length if entry.blob else 0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_splices_never_give_other_data(whole: Whole, copy: Path, data: st.DataObject) -> None:
    for original in (whole.index, whole.segment):
        content = original.read_bytes()
        first = 0 if original is whole.index else RESERVED - 64
        start = data.draw(st.integers(first, len(content)))
        moved = data.draw(st.integers(first, len(content)))
        patch = data.draw(st.binary(max_size=64) | st.just(content[moved : moved + 600]))
        behind = start + data.draw(st.integers(0, 64))
        (copy / original.name).write_bytes(content[:start] + patch + content[behind:])
    outcome(copy.parent, whole)
    for entry in Trace.open(copy.parent, on_damage="salvage").ranks[0].entries:
        assert entry == whole.entries[entry.event]
    list(check(copy.parent))
