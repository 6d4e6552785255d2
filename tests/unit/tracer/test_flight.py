"""A rank's files of which only the last steps stay: complete at any moment, bounded, self-contained."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.flight import FlightStore
from tensortrace.tracer.layout import version_of
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Kind, Mesh, Placement, Promise, RankManifest, Shard
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of

SIZE = 2048
SHARD = Shard(mesh="ddp", coordinate=(0,), placements=(Placement("replicate"),), global_shape=(SIZE,))
MESHES = {"ddp": Mesh(("dp",), (1,), (0,))}


class Run:
    """Steps of one activation, which is the same in all steps, its copy, and a parameter."""

    def __init__(self, root: Path, **promise: object) -> None:
        self.root = root
        self.ended = False
        self.promise = Promise(**promise)  # type: ignore[arg-type]
        self.writer = RankWriter(root, 0, promise=self.promise)
        self.store = FlightStore(self.writer, self.promise, rank=0, listener=None, on_end=self._end)
        self.event = 0

    def _end(self) -> None:
        self.ended = True

    def step(self, step: int, *, value: float = 1.0) -> None:
        ones = np.ones(SIZE, "<f4")
        self.put(ones, step=step, shard=SHARD)
        self.put(ones, step=step, slot="in.0", shard=SHARD)
        self.put(
            np.full(SIZE, value, "<f4"), step=step, kind=Kind.PARAM, name="w", slot="model", microbatch=None
        )
        self.put(np.full(SIZE, step, "<f4"), step=step, slot="out.9")
        self.end_step()

    def put(self, array: np.ndarray, **fields: object) -> None:
        self.store.append(boundary_of(self.event, array, **fields), array.view(np.uint8))
        self.event += 1

    def end_step(self, ended: str | None = None) -> None:
        self.store.end_step()
        version = version_of(self.promise)
        self.store.write_manifest(
            RankManifest(
                format=version, rank=0, world_size=1, meshes=MESHES, promise=self.promise, ended=ended
            )
        )

    def close(self) -> None:
        self.end_step("finished")
        self.store.close()


def problems(root: Path) -> list[str]:
    return [text for text in check(root) if "no trace.json" not in text and "did not finish" not in text]


def steps(root: Path) -> list[int]:
    """Return the steps kept; every tensor is read. Parameters of the step before are apart."""
    [rank] = Trace.open(root).ranks
    for entry in rank.entries:
        if rank.manifest and rank.manifest.promise.level == "full":
            rank.read(entry)
    return sorted({entry.step for entry in rank.entries if entry.kind is not Kind.PARAM})


def test_the_last_steps_stay_and_nothing_refers_to_what_went(tmp_path: Path) -> None:
    """The same bytes and shard in every step: each step stores them and declares it anew."""
    run = Run(tmp_path, keep_last=2)
    for step in range(6):
        run.step(step)
    run.close()
    assert steps(tmp_path) == [4, 5]
    [rank] = Trace.open(tmp_path).ranks
    assert rank.manifest is not None
    assert rank.manifest.window is not None
    assert (rank.manifest.window.first, rank.manifest.window.triggered) == (4, None)
    assert [(e.step, e.kind) for e in rank.entries if e.step < 4] == [(3, Kind.PARAM)]
    assert {entry.shard for entry in rank.entries if entry.slot == "in.0"} == {SHARD}
    assert problems(tmp_path) == []
    shutil.move(tmp_path / "rank00000" / "index.jsonl", tmp_path / "gone")
    assert steps(tmp_path) == [4, 5], "the segments alone tell the same"


def test_sketches_that_lines_refer_to_are_made_anew_in_each_step(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2, level="sketch")
    run.store.write_manifest(RankManifest(format=4, rank=0, world_size=1, meshes=MESHES))
    for step in range(6):
        run.step(step)
    run.close()
    [rank] = Trace.open(tmp_path).ranks
    assert steps(tmp_path) == [4, 5]
    assert len({entry.sketch for entry in rank.entries if entry.slot == "in.0"}) == 1
    assert all(entry.sketch is not None for entry in rank.entries)
    assert problems(tmp_path) == []


def test_it_reads_whole_at_every_moment(tmp_path: Path) -> None:
    """Copied after each step, as a kill leaves it: never fewer than the last two steps."""
    run = Run(tmp_path / "a", keep_last=2)
    for step in range(5):
        run.step(step)
        moment = tmp_path / f"copy{step}"
        shutil.copytree(tmp_path / "a", moment)
        assert problems(moment) == []
        assert steps(moment) == list(range(max(step - 1, 0), step + 1))


@pytest.mark.parametrize("cut_short", ["index", "segments"])
def test_a_kill_while_steps_are_dropped_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_short: str
) -> None:
    """Between manifest and index, or between index and segments."""
    run = Run(tmp_path, keep_last=1)
    run.step(0)
    with monkeypatch.context() as patch:
        if cut_short == "index":
            patch.setattr(RankWriter, "drop", lambda writer: None)
        else:
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        run.step(1)
    assert steps(tmp_path) == [1]
    assert problems(tmp_path) == []


def test_the_folder_never_grows(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2)
    sizes = []
    for step in range(30):
        run.step(step)
        sizes.append(sum(path.stat().st_size for path in (tmp_path / "rank00000").iterdir()))
    assert max(sizes[4:]) < 1.02 * sizes[4], "but for the digits of its numbers"
    assert len(list((tmp_path / "rank00000").iterdir())) <= 2 + 2 * 3


def test_a_trigger_keeps_what_came_before_and_some_after(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2, after=1, triggers=("nonfinite",))
    for step in range(9):
        run.step(step, value=np.nan if step == 5 else 1.0)
        assert run.ended == (step >= 6)
    run.close()
    assert steps(tmp_path) == [4, 5, 6]
    assert problems(tmp_path) == []


def test_steps_that_record_nothing_are_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=2)
    for step in (0, 3, 9):
        run.step(step)
        run.end_step()
        run.end_step()
    run.close()
    assert steps(tmp_path) == [3, 9]


def test_what_was_kept_is_in_the_promise_of_a_later_version() -> None:
    assert version_of(Promise(keep_last=1)) == 4
    assert version_of(Promise()) == 1
