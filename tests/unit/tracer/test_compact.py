"""A finished trace, compressed in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli.main import run
from tensortrace.tracer import compact as module
from tensortrace.tracer.compact import compact
from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Module, Placement, RankManifest, Shard
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of, write_trace

LARGE = (0.02 * np.random.default_rng(0).standard_normal((64, 128))).astype("<f4")
SHARD = Shard(mesh="ddp", coordinate=(0,), placements=(Placement("replicate"),))


def taken_as_it_was(root: Path) -> Path:
    """Return a trace of one rank whose tensors are raw, one of them at two boundaries."""
    write_trace(root, [])
    with RankWriter(root, 0, compress="none") as writer:
        for event, array in enumerate((LARGE, LARGE, LARGE + 1, np.arange(3))):
            writer.append(boundary_of(event, array, step=event // 2, name=f"m{event}"), array.tobytes())
        writer.write_manifest(RankManifest(format=1, rank=0, world_size=1, ended="finished"))
    return root


def contents(root: Path) -> list[tuple[object, ...]]:
    (rank,) = Trace.open(root).ranks
    return [(e.key, e.digest, e.stats, e.same_as, rank.read_bytes(e).tobytes()) for e in rank.entries]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_compacted_trace_is_smaller_and_holds_the_same(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    root = taken_as_it_was(tmp_path / "t")
    expected = contents(root)
    before, after = compact(root)
    assert after < 0.95 * before
    assert contents(root) == expected
    assert [entry.blob and entry.blob.codec for entry in Trace.open(root).ranks[0].entries] == [
        "planes", None, "planes", "raw",
    ]  # fmt: skip
    assert list(check(root)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_shards_and_earlier_attempts_stay(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_trace(root, [[({"shard": SHARD}, LARGE), ({"shard": SHARD, "name": "n"}, LARGE + 1)]])
    with RankWriter(root, 0, attempt=1) as writer:
        writer.append(boundary_of(0, LARGE, shard=SHARD), LARGE.tobytes())
        writer.write_manifest(RankManifest(format=1, rank=0, world_size=1, attempt=1, ended="finished"))
    earlier = (root / "rank00000" / "index.jsonl").read_bytes()
    compact(root)
    assert (root / "rank00000" / "index.jsonl").read_bytes() == earlier
    assert [entry.shard for entry in Trace.open(root).ranks[0].entries] == [SHARD]


def test_a_damaged_trace_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = taken_as_it_was(tmp_path / "t")
    segment = next(root.rglob("seg*"))
    data = bytearray(segment.read_bytes())
    data[(256 << 10) + 1000] ^= 1
    segment.write_bytes(data)
    assert run(["compact", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trace: error: ")
    assert segment.name in line
    assert segment.read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_is_not_finished_or_in_the_way_is_refused(tmp_path: Path) -> None:
    root = taken_as_it_was(tmp_path / "t")
    (tmp_path / "t.compacting").mkdir()
    with pytest.raises(BadRequest, match="in the way"):
        compact(root)
    (tmp_path / "t.compacting").rmdir()
    index = root / "rank00000" / "index.jsonl"
    index.rename(index.with_name("index.jsonl.part"))
    with pytest.raises(TraceError, match=r"index.jsonl.part: still open"):
        compact(root)
    with pytest.raises(BadRequest, match="no such folder"):
        compact(tmp_path / "none")


def test_a_disk_that_is_full_leaves_the_old_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = taken_as_it_was(tmp_path / "t")
    expected = contents(root)

    def full(self: RankWriter, *given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RankWriter, "rewrite", full)
    with pytest.raises(TraceError, match="not compacted: No space left"):
        compact(root)
    assert contents(root) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_a_reader_may_ignore_stays_where_it_is_known(tmp_path: Path) -> None:
    root = tmp_path / "t"
    write_trace(root, [])
    manifest = RankManifest(
        format=1, rank=0, world_size=1, ended="finished", ignorable=("modules",),
        modules=(Module("ReLU", names=("act",)),),
    )  # fmt: skip
    with RankWriter(root, 0, compress="none") as writer:
        writer.append(boundary_of(0, LARGE), LARGE.tobytes())
        writer.write_manifest(manifest)
    compact(root)
    (rank,) = Trace.open(root).ranks
    assert rank.manifest is not None
    assert rank.manifest.modules == manifest.modules
    assert rank.manifest.ignorable == ("modules",)
