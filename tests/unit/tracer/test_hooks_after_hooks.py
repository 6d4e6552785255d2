"""What tensor hooks of the program make of a gradient is recorded beside what backward computed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.memory_sink import recording

Hook = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained_with(hook: Hook) -> nn.Linear:
    """Return a layer whose weight's gradient is [3, 4] where no hook changes it."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.register_hook(hook)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    return model


@pytest.mark.parametrize(
    "hook",
    [lambda gradient: gradient * 2, lambda gradient: gradient.mul_(2)],
    ids=["another tensor", "in place"],
)
def test_what_a_hook_changes_is_recorded_as_it_was_and_as_it_is(hook: Hook) -> None:
    with recording() as sink:
        model = trained_with(hook)
    assert sink.one("local_grad", "weight", "grad", microbatch=0).tolist() == [[3.0, 4.0]]
    assert sink.one("local_grad", "weight", "hooked", microbatch=0).tolist() == [[6.0, 8.0]]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[6.0, 8.0]]


def test_each_microbatch_has_its_own() -> None:
    with recording() as sink:
        model = trained_with(lambda gradient: gradient + 1)
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
    assert sink.one("local_grad", "weight", "hooked", microbatch=1).tolist() == [[2.0, 3.0]]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[6.0, 8.0]]


def test_a_hook_that_only_looks_leaves_nothing_to_record() -> None:
    with recording() as sink:
        trained_with(lambda gradient: None)
    assert sink.find("local_grad", "weight", "hooked") == []


@pytest.mark.usefixtures("one_rank")
def test_a_hook_that_reduces_leaves_no_part_of_this_rank() -> None:
    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient / 2

    with recording() as sink:
        trained_with(reduced)
    assert sink.find("local_grad", "weight", "hooked") == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_parameters_inside_a_checkpoint_are_seen_too(reentrant: bool) -> None:
    with recording() as sink:
        model = nn.Linear(2, 1, bias=False)
        model.weight.register_hook(lambda gradient: gradient * 2)
        given = torch.tensor([[3.0, 4.0]], requires_grad=True)
        result = checkpoint(model, given, use_reentrant=reentrant)
        assert isinstance(result, torch.Tensor)
        result.sum().backward()
    assert sink.one("local_grad", "weight", "hooked", microbatch=0).tolist() == [[6.0, 8.0]]


def test_no_gradient_outlives_its_backward_on_our_account() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def noted(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(gradient))
        return gradient * 2

    with recording():
        model = trained_with(noted)
        model.zero_grad()
        gc.collect()
        assert seen[0]() is None


class Returning(torch.autograd.Function):
    """Returns a gradient whose address is noted."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, noted: list[int]) -> torch.Tensor:
        ctx.noted = noted
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        made = gradient * 3
        ctx.noted.append(made.data_ptr())
        return made, None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hooked, self.plain = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, noted: list[int]) -> torch.Tensor:
        return (self.hooked * 2 + Returning.apply(self.plain, noted)).sum()


def test_gradients_of_parameters_without_hooks_are_not_held() -> None:
    noted: list[int] = []
    with recording():
        model = Two()
        model.hooked.register_hook(lambda gradient: gradient * 2)
        model(noted).backward()
    assert model.plain.grad is not None
    assert [model.plain.grad.data_ptr()] == noted  # autograd took it, as it does where nobody else holds it
