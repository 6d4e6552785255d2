"""Tests of the recorder of one rank, with a store in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tensortrace.tracer.recorder import Identity, Recorder, Surroundings
from tensortrace.tracer.selection import parse_promise
from tensortrace.tracer.settings import Settings
from tensortrace.tracer.types import Boundary, Drops, Environment, Kind, Mesh, RankManifest


class Memory:
    """A rank's files, in memory."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.got: list[Boundary] = []
        self.values: list[bytes] = []
        self.manifests: list[RankManifest] = []
        self.closed = False
        self._error = error

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> None:
        if self._error is not None:
            raise self._error
        self.got.append(boundary)
        self.values.append(payload.tobytes())

    def end_step(self) -> None:
        pass

    def write_manifest(self, manifest: RankManifest) -> None:
        self.manifests.append(manifest)

    def close(self) -> None:
        self.closed = True


class Process:
    """What the recorder asks of its process, and what it did to it."""

    def __init__(self, store: Memory | Exception, *, is_guest: bool = False) -> None:
        self.store = store
        self.is_guest = is_guest
        self.opened = 0
        self.asked: list[Identity] = []

    def surroundings(self) -> Surroundings:
        return Surroundings(
            identify=lambda: Identity(3, 8, 0),
            describe=Environment,
            open_store=self._open,
            is_guest=lambda: self.is_guest,
            opened=self._note,
        )

    def _open(self, root: Path, identity: Identity) -> Memory:
        self.asked.append(identity)
        if isinstance(self.store, Exception):
            raise self.store
        return self.store

    def _note(self) -> None:
        self.opened += 1


def recorder_of(process: Process, **settings: object) -> Recorder:
    settings = {"root": "/nowhere", "min_free_bytes": 0, "buffer_bytes": 1 << 16} | settings
    return Recorder(Settings(**settings), process.surroundings())  # type: ignore[arg-type]


def emit(recorder: Recorder, *, step: int = 0, name: str = "w", kind: Kind = Kind.PARAM) -> int | None:
    return recorder.emit(torch.ones(4), step=step, microbatch=None, kind=kind, name=name, slot="model")


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "tensortrace-writer"]


def test_nothing_is_opened_before_the_first_boundary_that_is_wanted() -> None:
    process = Process(Memory())
    recorder = recorder_of(process, promise=parse_promise(kinds="param"))
    assert recorder.active
    assert emit(recorder, kind=Kind.LOSS) is None
    recorder.step_began(0)
    recorder.close("finished")
    assert process.asked == []


def test_a_model_that_only_evaluates_before_any_training_opens_nothing() -> None:
    process = Process(Memory())
    recorder = recorder_of(process)
    assert emit(recorder, step=-1, kind=Kind.ACTIVATION) is None
    assert emit(recorder, step=-1, kind=Kind.COLLECTIVE) is None
    recorder.close("finished")
    assert process.asked == []


def test_events_count_from_zero_in_the_order_of_the_calls() -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    assert [emit(recorder, name=name) for name in "abc"] == [0, 1, 2]
    recorder.close("finished")
    assert [(boundary.event, boundary.name) for boundary in store.got] == [(0, "a"), (1, "b"), (2, "c")]
    assert store.got[0].dtype == "float32"
    assert store.got[0].local_shape == (4,)


def test_rank_json_is_written_at_the_start_and_at_the_end() -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    emit(recorder)
    recorder.step_began(0)
    recorder.step_began(1)
    recorder.absent(Kind.REDUCED_GRAD, "one rank")
    recorder.absent(Kind.UNSCALED_GRAD, "no scaler")
    recorder.absent(Kind.UNSCALED_GRAD, None)
    recorder.close("finished")
    first, last = store.manifests[0], store.manifests[-1]
    assert (first.rank, first.world_size, first.pid, first.ended) == (3, 8, os.getpid(), None)
    assert (last.ended, last.steps, last.absent) == ("finished", 2, {"reduced_grad": "one rank"})
    assert store.closed


def test_a_mesh_is_on_disk_before_the_boundaries_that_refer_to_it_can_matter() -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    mesh = Mesh(("dp",), (2,), (0, 1))
    emit(recorder)
    recorder.mesh("ddp", mesh)
    recorder.mesh("ddp", mesh)
    recorder.close("exception: ValueError")
    assert [manifest.meshes for manifest in store.manifests] == [{}, {"ddp": mesh}, {"ddp": mesh}]
    assert store.manifests[-1].ended == "exception: ValueError"


def test_a_failure_is_said_once_and_ends_the_recording_not_the_training(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    emit(recorder, name="before")
    recorder.fail("hook optimizer", ValueError("boom"))
    recorder.fail("hook optimizer", ValueError("again"))
    assert not recorder.active
    assert emit(recorder) is None
    recorder.close("finished")
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == (
        "tensortrace: rank 3: recording stopped (hook optimizer: ValueError: boom); training goes on\n"
    )
    assert [boundary.name for boundary in store.got] == ["before"]
    assert store.manifests[-1].ended == "failed: hook optimizer: ValueError: boom"
    assert store.closed


def test_a_store_that_fails_ends_the_recording(capfd: pytest.CaptureFixture[str]) -> None:
    store = Memory(error=OSError(28, "No space left on device"))
    recorder = recorder_of(Process(store))
    emit(recorder)
    recorder.close("finished")
    assert not recorder.active
    assert capfd.readouterr().err.count("No space left on device") == 1
    assert store.manifests[-1].ended == "failed: writing: OSError: [Errno 28] No space left on device"


def test_an_output_that_cannot_be_opened_ends_the_recording(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = recorder_of(Process(PermissionError(13, "Permission denied")))
    assert emit(recorder) is None
    assert emit(recorder) is None
    recorder.close("finished")
    assert capfd.readouterr().err.count("opening the trace: PermissionError") == 1


def test_strict_hands_the_error_to_the_training(capfd: pytest.CaptureFixture[str]) -> None:
    recorder = recorder_of(Process(Memory()), strict=True)
    emit(recorder)
    with pytest.raises(ValueError, match="boom"):
        recorder.fail("hook", ValueError("boom"))
    with pytest.raises(ValueError, match="boom"):
        emit(recorder)
    recorder.close("finished")
    assert "boom" in capfd.readouterr().err


def test_strict_raises_what_the_writer_met_at_the_next_boundary() -> None:
    recorder = recorder_of(Process(Memory(error=OSError(28, "full"))), strict=True)
    emit(recorder)
    recorder.close("finished")
    assert recorder.active, "hooks must reach emit, which raises"
    with pytest.raises(OSError, match="full"):
        emit(recorder)


def test_a_guest_process_never_records() -> None:
    process = Process(Memory(), is_guest=True)
    recorder = recorder_of(process)
    assert emit(recorder) is None
    assert not recorder.active
    recorder.close("finished")
    assert (process.asked, process.opened) == ([], 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # where pytest itself has threads
def test_a_forked_child_neither_writes_nor_closes() -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    emit(recorder)
    child = os.fork()
    if child == 0:
        quiet = not recorder.active and not recorder.recording and emit(recorder) is None
        recorder.close("finished")
        os._exit(0 if quiet and len(store.manifests) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert emit(recorder) == 1
    recorder.close("finished")


def test_tensors_whose_bytes_cannot_be_taken_are_counted_as_dropped() -> None:
    store = Memory()
    recorder = recorder_of(Process(store))
    sparse = torch.ones(2, 2).to_sparse()
    meta = torch.ones(3, device="meta")
    for tensor in (sparse, meta):
        assert (
            recorder.emit(tensor, step=0, microbatch=0, kind=Kind.LOCAL_GRAD, name="e", slot="grad") is None
        )
    recorder.close("finished")
    reasons = {"not a strided tensor": 1, "a tensor without memory of its own": 1}
    assert store.manifests[-1].drops == Drops(2, 16 + 12, reasons)


def test_beyond_max_bytes_whole_boundaries_are_dropped_and_counted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = Memory()
    recorder = recorder_of(Process(store), max_bytes=0)
    emit(recorder)
    emit(recorder)
    recorder.close("finished")
    assert store.got == []
    assert store.manifests[-1].drops == Drops(2, 32, {"max_bytes": 2})
    assert store.manifests[-1].ended == "finished"
    assert capfd.readouterr().err.count("max_bytes") == 1


def test_no_mode_of_the_program_sees_our_operations() -> None:
    class Spy(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Spy.calls += 1
            return function(*args, **(kwargs or {}))

    recorder = recorder_of(Process(Memory()))
    tensor = torch.ones(2, 3, requires_grad=True)
    part = tensor.t()
    version = tensor._version
    with Spy():
        Spy.calls = 0
        for value in (tensor, part):
            recorder.emit(value, step=0, microbatch=0, kind=Kind.ACTIVATION, name="a", slot="out")
        calls = Spy.calls
    recorder.close("finished")
    assert calls == 0
    assert tensor._version == version


def test_a_dry_run_writes_no_file_and_stops_after_one_step(capfd: pytest.CaptureFixture[str]) -> None:
    store = Memory()
    recorder = recorder_of(Process(store), dry_run=True)
    emit(recorder, step=-1)
    recorder.step_began(0)
    emit(recorder, step=0)
    recorder.step_began(1)
    assert not recorder.active
    assert emit(recorder, step=1) is None
    recorder.close("finished")
    assert [boundary.step for boundary in store.got] == [-1, 0]
