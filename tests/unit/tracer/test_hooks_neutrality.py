"""Recording changes no bit of any of the programs, and nothing of theirs outlives them."""

from __future__ import annotations

import gc
import weakref
from functools import lru_cache

import pytest
import torch
from torch import nn

from tensortrace.tracer import hooks
from tests.memory_sink import recording
from tests.unit.tracer.programs import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*lr_scheduler.step")


@lru_cache
def unrecorded(name: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return PROGRAMS[name]()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_bit_is_the_same_with_and_without_recording(name: str) -> None:
    expected = unrecorded(name)
    torch.manual_seed(1)
    with recording() as sink:
        found = PROGRAMS[name]()
    assert sink.kept
    assert len(expected) == len(found)
    for before, after in zip(expected, found, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_recordings_of_one_program_have_the_same_keys(name: str) -> None:
    keys = []
    for _ in range(2):
        torch.manual_seed(1)
        with recording() as sink:
            PROGRAMS[name]()
        keys.append([kept.boundary.key for kept in sink.kept])
    assert keys[0] == keys[1]


@pytest.mark.parametrize("fault", sorted(hooks.guard.GUARDED))
def test_an_error_in_any_hook_leaves_the_training_as_it_was(fault: str) -> None:
    names = (
        "scaler_skips_a_step",
        "checkpointing_nonreentrant",
        "tied_embeddings",
        "handwritten_loss_and_step",
    )
    for name in (*names, "schedulers"):
        expected = unrecorded(name)
        torch.manual_seed(1)
        with recording(may_fail=True) as sink:
            hooks.guard.inject(fault)
            found = PROGRAMS[name]()
        assert all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(expected, found, strict=True)
        )
        assert [where for where, _ in sink.failures] in ([], [fault])


def test_removed_hooks_leave_torch_as_it_was_found() -> None:
    before = (nn.Module._call_impl, torch.autograd.backward, nn.functional.cross_entropy, nn.Module.compile)
    with recording():
        assert nn.functional.cross_entropy is not before[2]
    after = (nn.Module._call_impl, torch.autograd.backward, nn.functional.cross_entropy, nn.Module.compile)
    assert before == after


def test_nothing_of_the_program_is_kept_alive() -> None:
    with recording():
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters())
        output = model(torch.randn(2, 3))
        loss = nn.functional.mse_loss(output, torch.zeros(2, 2))
        loss.backward()
        held = [
            weakref.ref(t) for t in (output, loss, model[0].weight, model[0].weight.grad, model, optimizer)
        ]
        optimizer.step()
        del output, loss, model, optimizer
        gc.collect()
        assert [reference() for reference in held] == [None] * len(held)


class _Probe:
    def __init__(self, freed: list[int]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(1)


def test_a_graph_without_backward_is_freed_with_its_loss() -> None:
    with recording():
        model = nn.Linear(3, 4)
        loss = nn.functional.mse_loss(model(torch.randn(2, 3)), torch.zeros(2, 4))
        freed: list[int] = []
        loss.grad_fn.metadata["probe"] = _Probe(freed)
        del loss
        gc.collect()
        assert freed == [1]
