"""Tests of the bounded queue between training and writer."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tensortrace.tracer import staging
from tensortrace.tracer.codec_values import statistics
from tensortrace.tracer.copies import copy_bytes
from tensortrace.tracer.keeping import Summary
from tensortrace.tracer.settings import Pressure
from tensortrace.tracer.staging import Stage
from tensortrace.tracer.types import Boundary, Kind, Mesh

PATIENCE_S = 30


class Gate:
    """A store that keeps what it gets, and writes nothing before it is opened."""

    def __init__(self, *, is_open: bool = True, error_at: int | None = None) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.got: list[tuple[int, bytes | None]] = []
        self.hurried: list[bool] = []
        self._error_at = error_at
        if is_open:
            self.opened.set()

    def append(self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        if boundary.event == self._error_at:
            raise OSError(28, "full")
        self.got.append((boundary.event, payload.tobytes()))
        self.hurried.append(hurried)


class Rig:
    """A stage with what it reported."""

    def __init__(self, store: Gate, *, capacity: int = 1024, pressure: Pressure = "block") -> None:
        self.errors: list[BaseException] = []
        self.ends = 0
        self.stage = Stage(
            store, capacity=capacity, pressure=pressure, on_error=self.errors.append, on_end=self._end
        )
        self._event = 0

    def _end(self) -> None:
        self.ends += 1

    def add(self, tensor: torch.Tensor, slot: str = "model") -> bool:
        given = boundary(self._event, tensor, slot)
        taken = self.stage.take(tensor, given)
        if taken is None:
            return False
        self.stage.queue(given, taken)
        self._event += 1
        return True


def boundary(event: int, tensor: torch.Tensor, slot: str = "model") -> Boundary:
    return Boundary(
        event=event, step=0, microbatch=None, kind=Kind.PARAM, name="p", slot=slot,
        dtype="float32", local_shape=tuple(tensor.shape),
    )  # fmt: skip


def in_thread(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def test_what_is_written_is_the_value_at_the_time_of_the_call() -> None:
    store = Gate(is_open=False)
    rig = Rig(store)
    tensor = torch.arange(4, dtype=torch.float32)
    before = tensor.numpy().tobytes()
    assert rig.add(tensor)
    tensor.zero_()
    store.opened.set()
    assert rig.stage.close()
    assert store.got == [(0, before)]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
        torch.arange(8, dtype=torch.bfloat16)[::2],
        torch.tensor([True, False]),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.ones(3).expand(2, 3),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "strided", "bool", "scalar", "empty", "conjugate", "expanded", "parameter"],
)
def test_bytes_are_the_elements_in_row_major_order(tensor: torch.Tensor) -> None:
    store = Gate()
    rig = Rig(store)
    assert rig.add(tensor)
    assert rig.stage.close()
    expected = tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    assert store.got == [(0, expected)]


def test_a_full_buffer_drops_under_drop() -> None:
    store = Gate(is_open=False)
    rig = Rig(store, capacity=128, pressure="drop")
    assert [rig.add(torch.ones(16)) for _ in range(3)] == [True, True, False]
    store.opened.set()
    assert rig.stage.close()
    assert [event for event, _ in store.got] == [0, 1]


def test_a_full_buffer_makes_training_wait_under_block() -> None:
    store = Gate(is_open=False)
    rig = Rig(store, capacity=128)
    trainer = in_thread(lambda: [rig.add(torch.full((16,), float(n))) for n in range(50)])
    assert store.entered.wait(PATIENCE_S)
    assert trainer.is_alive(), "fifty tensors cannot have gone into room for two"
    store.opened.set()
    trainer.join(PATIENCE_S)
    assert rig.stage.close()
    assert store.got == [(n, np.full(16, n, np.float32).tobytes()) for n in range(50)]


def test_a_tensor_larger_than_the_buffer_goes_alone() -> None:
    store = Gate()
    rig = Rig(store, capacity=128)
    assert rig.add(torch.ones(1000))
    assert rig.add(torch.ones(1))
    assert rig.add(torch.ones(1000))
    assert rig.stage.close()
    assert [len(payload) for _, payload in store.got] == [4000, 4, 4000]


def test_what_was_lent_outside_the_buffer_is_let_go_of_once_it_is_written() -> None:
    store = Gate()
    rig = Rig(store, capacity=64)
    tensor = torch.arange(1000.0)
    given = boundary(0, tensor)
    taken = rig.stage.take(tensor, given)
    assert taken is not None
    assert taken.lease is not None
    memory = weakref.ref(taken.lease.whole)
    rig.stage.queue(given, taken)
    del taken
    written = threading.Event()
    rig.stage.run_in_order(written.set)
    assert written.wait(PATIENCE_S)
    assert memory() is None
    assert rig.stage.close()
    assert store.got == [(0, tensor.numpy().tobytes())]


def test_threads_that_share_little_memory_lose_nothing() -> None:
    store = Gate()
    stage = Rig(store, capacity=3 * 4096).stage
    each, threads = 300, 4

    def train(first: int) -> None:
        for event in range(first, first + each):
            tensor = torch.full((event % 1024 + 1,), float(event))
            given = boundary(event, tensor)
            taken = stage.take(tensor, given)
            assert taken is not None
            stage.queue(given, taken)

    running = [in_thread(functools.partial(train, each * number)) for number in range(threads)]
    for thread in running:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert stage.close()
    expected = {event: np.full(event % 1024 + 1, event, "f4").tobytes() for event in range(each * threads)}
    assert len(store.got) == each * threads
    assert dict(store.got) == expected


def test_a_failing_store_wakes_the_training_that_waits_for_it() -> None:
    store = Gate(is_open=False, error_at=0)
    rig = Rig(store, capacity=128)
    outcomes: list[bool] = []
    trainer = in_thread(lambda: outcomes.extend(rig.add(torch.ones(16)) for _ in range(5)))
    assert store.entered.wait(PATIENCE_S)
    store.opened.set()
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()
    assert not outcomes[-1]
    assert rig.stage.close()
    assert [type(error) for error in rig.errors] == [OSError]
    assert rig.ends == 1


def test_jobs_run_after_what_was_queued_before_them() -> None:
    store = Gate(is_open=False)
    rig = Rig(store)
    seen: list[int] = []
    rig.add(torch.ones(1))
    rig.stage.run_in_order(lambda: seen.append(len(store.got)))
    rig.add(torch.ones(1))
    store.opened.set()
    assert rig.stage.close()
    assert seen == [1]


def test_no_thread_is_left_after_close() -> None:
    rig = Rig(Gate())
    rig.add(torch.ones(1))
    assert rig.stage.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tensortrace-writer"]
    assert not rig.add(torch.ones(1)), "a closed stage takes nothing"


def test_a_writer_that_gets_nothing_done_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Gate(is_open=False)
    rig = Rig(store)
    rig.add(torch.ones(1))
    monkeypatch.setattr(staging, "GIVE_UP_S", 0.01)
    assert not rig.stage.close()
    store.opened.set()
    monkeypatch.setattr(staging, "GIVE_UP_S", PATIENCE_S)
    assert rig.stage.close()


class Memory(Gate):
    """A store that remembers contents; ``got`` has None for bytes that it was not given again."""

    remembers = 8

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__(is_open=is_open)
        self.summaries: list[float | None] = []
        self.flushed: list[int] = []

    @property
    def keeping(self) -> Memory:
        return self

    def held(self, boundary: Boundary) -> str:
        return boundary.slot

    def sums(self, boundary: Boundary) -> bool:
        return boundary.slot == "summed"

    def look(self, boundary: Boundary, data: NDArray[np.uint8]) -> None:
        pass

    def know(self, meshes: Mapping[str, Mesh]) -> None:
        pass

    def summary(self, boundary: Boundary, data: NDArray[np.uint8]) -> Summary | None:
        return Summary(statistics("float32", data)) if self.sums(boundary) else None

    def append_known(
        self, boundary: Boundary, digest: str, payload: NDArray[np.uint8] | None, *, hurried: bool = False,
        held: str = "", summary: Summary | None = None,
    ) -> None:  # fmt: skip
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        self.hurried.append(hurried)
        self.summaries.append(None if summary is None else summary.stats.mean)
        self.got.append((boundary.event, None if payload is None else payload.tobytes()))

    def flush(self) -> None:
        self.flushed.append(len(self.got))


def test_a_content_that_the_store_knows_is_not_given_again() -> None:
    store = Memory(is_open=False)
    rig = Rig(store, capacity=192)
    one, other = torch.ones(16), torch.full((4, 4), 1.0)
    bytes_of_one = one.numpy().tobytes()
    assert all(rig.add(tensor) for tensor in (one, one.clone(), other, one)), (
        "room for two and one that comes and goes"
    )
    one.data.mul_(1.0)
    assert rig.add(one)
    store.opened.set()
    assert rig.stage.close()
    assert store.got == [(0, bytes_of_one), (1, None), (2, bytes_of_one), (3, None), (4, None)]


def test_what_was_stored_is_made_to_last_once_nothing_comes_any_more() -> None:
    store = Memory()
    rig = Rig(store)
    assert all(rig.add(torch.full((4,), float(number))) for number in range(3))
    deadline = time.monotonic() + PATIENCE_S
    while store.flushed[-1:] != [3] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.flushed[-1] == 3
    assert rig.stage.close()


def test_a_content_is_known_only_for_what_is_held_alike() -> None:
    store = Memory()
    rig = Rig(store)
    for slot in ("model", "master", "model", "master"):
        assert rig.add(torch.ones(4), slot)
    assert rig.stage.close()
    assert [payload is None for _, payload in store.got] == [False, False, True, True]


def test_a_write_that_no_version_tells_of_is_seen() -> None:
    store = Memory()
    rig = Rig(store)
    tensor = torch.ones(4)
    assert rig.add(tensor)
    version = tensor._version
    tensor.data.mul_(2.0)
    assert tensor._version == version
    assert rig.add(tensor)
    assert rig.stage.close()
    assert store.got[1] == (1, np.full(4, 2, np.float32).tobytes())


def test_a_tensor_that_was_here_before_takes_no_room() -> None:
    store = Memory(is_open=False)
    rig = Rig(store, capacity=64, pressure="drop")
    tensor = torch.ones(16)
    assert [rig.add(tensor) for _ in range(4)] == [True] * 4, "the room holds one"
    assert not rig.add(tensor.clone()), "nobody knows of another tensor what it holds"
    store.opened.set()
    assert rig.stage.close()
    assert [payload is None for _, payload in store.got] == [False, True, True, True]


def test_a_content_that_the_store_may_have_forgotten_is_given_again() -> None:
    store = Memory()
    rig = Rig(store)
    for number in (0, 1, 2, 3, 4, 0):
        assert rig.add(torch.full((4,), float(number)))
    assert rig.stage.close()
    assert all(payload is not None for _, payload in store.got)


@pytest.mark.parametrize(
    "tensor", [torch.full((4, 4), 3.0), torch.full((4, 8), 3.0)[:, ::2]], ids=["plain", "strided"]
)
def test_what_is_summed_up_takes_no_room_and_is_the_value_at_the_time_of_the_call(
    tensor: torch.Tensor,
) -> None:
    store = Memory(is_open=False)
    rig = Rig(store, capacity=64, pressure="drop")
    for factor in (1.0, 1.0, 2.0):
        tensor.mul_(factor)
        assert rig.add(tensor, "summed"), "of a content the room holds one"
    tensor.zero_()
    store.opened.set()
    assert rig.stage.close()
    assert store.got == [(0, None), (1, None), (2, None)]
    assert store.summaries == [3.0, None, 6.0]


def test_boundaries_that_wait_are_counted_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MOST_QUEUED", 3)
    store = Gate(is_open=False)
    rig = Rig(store, capacity=1 << 20, pressure="drop")
    assert rig.add(torch.ones(1))
    assert store.entered.wait(PATIENCE_S)
    assert [rig.add(torch.ones(1)) for _ in range(4)] == [True, True, True, False]
    store.opened.set()
    assert rig.stage.close()


def test_the_store_is_told_to_hurry_where_cores_train() -> None:
    store = Memory()
    rig = Rig(store)
    assert rig.add(torch.ones(4))
    assert rig.stage.close()
    assert store.hurried == [True]


def test_the_store_is_told_to_hurry_while_the_buffer_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_from_a_device(tensor: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        copy_bytes(tensor, target)
        return lambda: None

    monkeypatch.setattr(staging, "is_plain", lambda tensor: False)
    monkeypatch.setattr(staging, "copy_bytes", copy_from_a_device)
    store = Gate(is_open=False)
    rig = Rig(store, capacity=1024)
    for number in range(8):
        assert rig.add(torch.full((16,), float(number)))
    store.opened.set()
    assert rig.stage.close()
    assert store.hurried[1] is True
    assert store.hurried[4:] == [False] * 4, "a quarter of the buffer is left when four of its sixteenths are"


def test_training_that_waits_for_a_place_goes_on_where_no_boundary_gives_back_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "MOST_QUEUED", 3)
    store = Memory(is_open=False)
    rig = Rig(store)
    assert rig.add(torch.ones(1))
    assert store.entered.wait(PATIENCE_S)
    assert all(rig.add(torch.ones(1)) for _ in range(3)), "repeats, without bytes of their own"
    waiting = in_thread(lambda: rig.add(torch.ones(1)))
    waiting.join(0.1)
    assert waiting.is_alive()
    store.opened.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert rig.stage.close()
    assert [event for event, _ in store.got] == [0, 1, 2, 3, 4]


def test_training_that_waits_for_memory_gets_what_another_thread_turned_out_not_to_need() -> None:
    store = Memory(is_open=False)
    rig = Rig(store, capacity=192)
    kept, same, other = (torch.full((16,), value) for value in (1.0, 1.0, 2.0))
    assert rig.add(kept)
    taken = rig.stage.take(same, boundary(1, same))
    assert taken is not None
    assert rig.stage.take(torch.zeros(16), boundary(2, same)) is not None
    waiting = in_thread(lambda: rig.add(other))
    waiting.join(0.1)
    assert waiting.is_alive(), "64 bytes each, and room for three"
    rig.stage.queue(boundary(1, same), taken)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    store.opened.set()
    assert rig.stage.close()
