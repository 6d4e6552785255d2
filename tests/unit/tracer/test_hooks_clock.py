"""Which step, microbatch and call a boundary gets, as docs/recording.md defines them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.memory_sink import MemorySink, recording
from tests.unit.tracer.programs import Checkpointed


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def moments(sink: MemorySink, kind: str, name: str, slot: str) -> list[tuple[int, int | None, int]]:
    return [
        (kept.boundary.step, kept.boundary.microbatch, kept.boundary.call)
        for kept in sink.find(kind, name, slot)
    ]


def test_init_comes_before_the_first_forward_and_windows_count_from_zero() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            backward(model)
            optimizer.step()
    assert sink.steps == [0, 1]
    assert [kept.boundary.step for kept in sink.find("param", "weight")] == [-1, 0, 1]
    assert sink.kept[0].boundary.kind == "param"


def test_a_microbatch_begins_with_the_first_forward_after_a_backward() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        both = model(torch.ones(2, 3)).sum() + model(torch.ones(2, 3)).sum()
        both.backward()
        backward(model)
        optimizer.step()
        backward(model)
    assert moments(sink, "activation", "(root)", "out") == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert moments(sink, "local_grad", "weight", "grad") == [
        (0, 0, 0), (0, 1, 0), (0, None, 0), (1, 0, 0), (1, None, 0),
    ]  # fmt: skip


def test_forwards_without_grad_are_eval_passes_of_the_window_that_is_open() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(1, 3))  # before any window: of the model that is trained it is an evaluation
        backward(model)
        with torch.no_grad():
            F.mse_loss(model(torch.ones(1, 3)), torch.zeros(1, 2))
        optimizer.step()
        with torch.inference_mode():
            model(torch.ones(1, 3))
        backward(model)
    assert moments(sink, "activation", "(root)", "out") == [
        (0, 0, 0), (0, None, 0), (0, None, 1), (1, 0, 0),
    ]  # fmt: skip
    assert moments(sink, "loss", "mse_loss", "value") == [(0, None, 0)]
    modes = [kept.boundary.meta.grad_enabled for kept in sink.find("activation", "(root)", "out")]
    assert modes == [True, False, False, True]
    assert moments(sink, "input", "(root)", "in.0") == moments(sink, "activation", "(root)", "out")


def test_grad_disabled_inside_a_forward_changes_nothing() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.inner(x)
            return self.head(x)

    with recording() as sink:
        backward(Outer())
    assert moments(sink, "activation", "inner", "out") == [(0, 0, 0)]
    assert sink.find("activation", "inner", "out")[0].boundary.meta.grad_enabled is True


def test_two_optimizers_after_one_forward_make_one_step() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.Adam([model.bias])
        for _ in range(2):
            backward(model)
            first.step()
            second.step()
    assert sink.steps == [0, 1]
    assert moments(sink, "schedule", "optimizer.1", "skipped") == [(0, None, 0), (1, None, 0)]
    assert moments(sink, "optimizer_state", "bias", "exp_avg") == [(0, None, 0), (1, None, 0)]


def test_an_optimizer_that_steps_twice_in_a_window_counts_its_calls() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        backward(model)
        optimizer.step()
        optimizer.step()
    for kind, name, slot in (
        ("schedule", "optimizer.0.group.0", "lr"),
        ("optimizer_state", "weight", "exp_avg"),
        ("param", "weight", "model"),
        ("clipped_grad", "weight", "grad"),
    ):
        assert [m for m in moments(sink, kind, name, slot) if m[0] == 0] == [(0, None, 0), (0, None, 1)]


def test_each_step_of_lbfgs_is_a_window_and_its_closures_are_microbatches() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 3)) - 1).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert sink.steps == [0, 1]
    assert {kept.boundary.microbatch for kept in sink.find("activation", "(root)", "out", step=1)} >= {0, 1}


def test_a_step_made_to_create_optimizer_state_is_not_a_window() -> None:
    with recording() as sink:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        backward(model)
        optimizer.step()
    assert sink.steps == [0]


def test_a_program_without_modules_opens_windows_by_its_backwards() -> None:
    with recording() as sink:
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(2):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sink.steps == [0, 1]
    # w = 1, gradient 2w: 1 - 0.5 * 2 = 0, and 0 stays.
    assert [kept.value[0].item() for kept in sink.find("param", "param.0", "model")] == [1.0, 0.0, 0.0]
    assert [kept.value[0].item() for kept in sink.find("local_grad", "param.0", microbatch=0)] == [2.0, 0.0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_has_the_keys_and_values_of_the_first_pass(reentrant: bool) -> None:
    with recording() as sink:
        model = Checkpointed(reentrant=reentrant)
        model(torch.randn(4, 3)).square().mean().backward()
    # Without reentrance the recompute stops at the last tensor that backward needs: before dropout returns.
    for name in ("blocks.0.0", "blocks.1.0", *(["blocks.0.1"] if reentrant else [])):
        passes = sink.find("activation", name, "out")
        assert [kept.boundary.recompute for kept in passes] == [False, True]
        assert passes[0].boundary.key == passes[1].boundary.key
        assert torch.equal(passes[0].value, passes[1].value)
    assert len(sink.find("activation", "entry", "out")) == 1
    assert len(sink.find("activation_grad", "blocks.0.0", "out")) == 1
    assert len(sink.find("activation_grad", "blocks.0.0", "in.0")) == 1


def test_a_module_called_twice_in_one_checkpoint_keeps_its_call_numbers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return checkpoint(lambda y: self.layer(self.layer(y).tanh()).tanh(), x, use_reentrant=False)

    with recording() as sink:
        backward(Twice())
    calls = [(k.boundary.call, k.boundary.recompute) for k in sink.find("activation", "layer", "in.0")]
    assert calls == [(0, False), (1, False), (2, False), (1, True), (2, True)]


def test_every_call_of_a_raising_forward_leaves_the_stack_straight() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
            x = self.layer(x)
            if fail:
                raise KeyError
            return x

    with recording() as sink:
        model = nn.ModuleDict({"it": Raises()})
        for fail in (True, False):
            try:
                model["it"](torch.ones(2, 3), fail)
            except KeyError:
                pass
    # Were the failed call still on the stack, the second would not be a root and get no producers.
    assert moments(sink, "activation", "it", "out") == [(0, 0, 0)]
    assert moments(sink, "activation", "it.layer", "out") == [(0, 0, 0), (0, 0, 1)]
