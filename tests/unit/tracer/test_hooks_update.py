"""Gradients on their way to the update, and what the update reads and leaves."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

from tests.memory_sink import MemorySink, recording


def line(weight: float = 1.0) -> nn.Linear:
    """Return y = weight * x, whose gradient for the loss y is x."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)
    return model


def values(sink: MemorySink, kind: str, name: str, slot: str, **wanted: object) -> list[float]:
    return [kept.value.item() for kept in sink.find(kind, name, slot, **wanted)]


def test_local_gradients_are_those_of_each_backward_and_their_sum_ignores_leftovers() -> None:
    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            for x in (2.0, 5.0):
                model(torch.tensor([[x]])).sum().backward()
            optimizer.step()  # and no zero_grad
    assert values(sink, "local_grad", "weight", "grad", step=1, microbatch=0) == [2.0]
    assert values(sink, "local_grad", "weight", "grad", step=1, microbatch=1) == [5.0]
    assert values(sink, "local_grad", "weight", "grad", microbatch=None) == [7.0, 7.0]
    assert values(sink, "clipped_grad", "weight", "grad") == [7.0, 14.0]
    assert values(sink, "local_grad", "weight", "start") == [7.0]


def test_window_sums_are_float32_at_least() -> None:
    with recording() as sink:
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for x in (256.0, 1.0):
            model(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    total = sink.one("local_grad", "weight", "grad", microbatch=None)
    assert (total.dtype, total.item()) == (torch.float32, 257.0)
    # bfloat16 has 8 bits: the program's own sum loses the 1.
    assert values(sink, "clipped_grad", "weight", "grad") == [256.0]


def test_a_window_that_no_optimizer_ends_still_has_its_sum() -> None:
    with recording() as sink:
        model = line()
        model(torch.tensor([[3.0]])).sum().backward()
    assert values(sink, "local_grad", "weight", "grad", microbatch=None) == [3.0]


def test_clipping_states_norm_factor_and_both_gradients() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        nn.utils.clip_grad_value_(model.parameters(), 0.7)
        optimizer.step()
    assert sink.one("clipped_grad", "weight", "before", call=0).tolist() == [[3.0, 4.0]]
    assert sink.one("clipped_grad", "weight", "grad", call=0, microbatch=0)[0].tolist() == pytest.approx(
        [0.6, 0.8]
    )
    assert sink.one("clipped_grad", "weight", "grad", call=1, microbatch=0)[0].tolist() == pytest.approx(
        [0.6, 0.7]
    )
    assert sink.one("clipped_grad", "weight", "grad", microbatch=None)[0].tolist() == pytest.approx(
        [0.6, 0.7]
    )
    assert values(sink, "clipped_grad", "(clip)", "total_norm") == [5.0]
    assert values(sink, "clipped_grad", "(clip)", "max_norm") == pytest.approx([1.0, 0.7])
    assert values(sink, "clipped_grad", "(clip)", "norm_type") == [2.0]
    assert values(sink, "clipped_grad", "(clip)", "coefficient") == pytest.approx([0.2], rel=1e-5)
    meta = sink.find("clipped_grad", "(clip)", "total_norm")[0].boundary.meta
    assert (meta.members, meta.op) == (("weight",), "clip_grad_norm_")


def test_the_coefficient_of_a_clip_that_does_nothing_is_one() -> None:
    with recording() as sink:
        model = line()
        model(torch.tensor([[3.0]])).sum().backward()
        clip_grad_norm_(model.parameters(), 10.0)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.5, norm)
    assert values(sink, "clipped_grad", "(clip)", "coefficient") == pytest.approx([1.0, 0.5], rel=1e-5)


def test_the_schedule_holds_what_enters_the_formula_and_nothing_else() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        groups = [
            {"params": [model.weight], "weight_decay": 0.5},
            {"params": [model.bias], "lr": torch.tensor(0.25)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.125, betas=(0.5, 0.75), foreach=False, amsgrad=True)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    slots = {kept.boundary.slot: kept.value.item() for kept in sink.find("schedule", "optimizer.0.group.0")}
    assert slots == {
        "lr": 0.125, "betas.0": 0.5, "betas.1": 0.75, "eps": 1e-8, "weight_decay": 0.5, "amsgrad": 1.0,
        "maximize": 0.0, "decoupled_weight_decay": 1.0,
    }  # fmt: skip
    assert values(sink, "schedule", "optimizer.0.group.1", "lr") == [0.25]
    metas = [sink.find("schedule", f"optimizer.0.group.{g}", "lr")[0].boundary.meta for g in (0, 1)]
    assert [meta.members for meta in metas] == [("weight",), ("bias",)]
    assert metas[0].optimizer == "AdamW"
    assert values(sink, "schedule", "optimizer.0", "skipped") == [0]
    assert sink.one("schedule", "optimizer.0", "skipped").dtype == torch.int64


def test_schedulers_of_every_make_state_their_position_by_order_of_construction() -> None:
    class Custom(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            return [0.5]

    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)]
        schedulers = [
            lr_scheduler.SequentialLR(optimizer, parts, [1]),
            lr_scheduler.ReduceLROnPlateau(optimizer),
            Custom(optimizer),
            lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0),
        ]
        # A sequence starts its second part only at the milestone: until then that stands before its start.
        for _ in range(3):
            model(torch.tensor([[3.0]])).sum().backward()
            optimizer.step()
            schedulers[0].step()
            schedulers[1].step(1.0)
            schedulers[2].step()
    found = {
        name: values(sink, "schedule", name, "position") for name in sink.names("schedule") if "sched" in name
    }
    assert found == {
        "scheduler.0": [0, 0, 0], "scheduler.1": [-1, 0, 1], "scheduler.2": [0, 1, 2],
        "scheduler.3": [0, 1, 2],
        "scheduler.4": [0, 1, 2], "scheduler.5": [0, 0, 0],
    }  # fmt: skip
    assert sink.find("schedule", "scheduler.4")[0].boundary.meta.module == "Custom"


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_recorded_as_skipped(fused: bool) -> None:
    with recording() as sink:
        model = line()
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in (2.0, float("inf"), 3.0):
            scaler.scale(model(torch.tensor([[x]])).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert sink.steps == [0, 1, 2]
    assert values(sink, "schedule", "optimizer.0", "skipped") == [0, 1, 0]
    assert values(sink, "schedule", "scaler.0", "scale") == [8.0, 8.0, 4.0]
    assert values(sink, "local_grad", "weight", "grad", microbatch=0) == [16.0, float("inf"), 12.0]
    weights = values(sink, "param", "weight", "model")
    assert len(weights) == 4
    assert weights[1] == weights[2] != weights[3]
    assert values(sink, "optimizer_state", "weight", "step") == [1.0, 1.0, 2.0]
    consumed = values(sink, "clipped_grad", "weight", "grad")
    # A fused step divides the scale out itself: what it consumes is still scaled.
    assert consumed == ([16.0, float("inf"), 12.0] if fused else [2.0, float("inf"), 3.0])
    assert values(sink, "unscaled_grad", "weight", "grad") == ([] if fused else consumed)
    assert ("unscaled_grad" in sink.absences) is fused


def test_an_explicit_unscale_is_one_event_and_comes_before_the_clip() -> None:
    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.tensor([[2.0]])).sum()).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    assert values(sink, "unscaled_grad", "weight", "grad") == [2.0]
    assert values(sink, "clipped_grad", "weight", "before") == [2.0]


def test_a_disabled_scaler_leaves_the_rung_absent() -> None:
    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(torch.tensor([[2.0]])).sum()).backward()
        scaler.step(optimizer)
    assert sink.absences == {
        "reduced_grad": "no reduction across ranks was seen", "unscaled_grad": "no GradScaler was used",
    }  # fmt: skip
    assert values(sink, "schedule", "optimizer.0", "skipped") == [0]


def test_restored_optimizer_state_is_part_of_init() -> None:
    source = line()
    first = torch.optim.Adam(source.parameters())
    source(torch.tensor([[2.0]])).sum().backward()
    first.step()
    with recording() as sink:
        model = line()
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(first.state_dict())
        model(torch.tensor([[2.0]])).sum().backward()
    assert values(sink, "optimizer_state", "weight", "step", step=-1) == [1.0]
    assert values(sink, "optimizer_state", "weight", "exp_avg", step=-1) == pytest.approx([0.2])


def test_a_parameter_changed_by_hand_is_recorded_when_the_window_opens() -> None:
    with recording() as sink:
        model = line(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(3):
            model(torch.tensor([[2.0]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                model.weight.data.mul_(3.0)
    assert values(sink, "param", "weight", "model") == [1.0, -1.0, -3.0, -11.0]
    assert values(sink, "param", "weight", "start") == [-9.0]
    assert sink.find("param", "weight", "start")[0].boundary.step == 2


def test_buffers_are_recorded_at_init_and_where_they_changed() -> None:
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("constant", torch.ones(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
    assert [kept.boundary.step for kept in sink.find("buffer", "constant")] == [-1]
    assert [kept.boundary.step for kept in sink.find("buffer", "1.running_mean")] == [-1, 0, 1]
    assert values(sink, "buffer", "1.num_batches_tracked", "model") == [0, 1, 2]


def test_a_frozen_parameter_has_a_value_and_no_gradient() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [kept.boundary.meta.requires_grad for kept in sink.find("param", "bias")] == [False]
    assert sink.names("local_grad") == ["weight"]


def test_a_parameter_unfrozen_later_has_gradients_from_then_on() -> None:
    with recording() as sink:
        model = nn.Linear(1, 1).requires_grad_(False)
        model.bias.requires_grad_(True)
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
            model.weight.requires_grad_(True)
    assert len(sink.find("local_grad", "weight", "grad", microbatch=0)) == 0
    assert len(sink.find("local_grad", "weight", "grad", microbatch=1)) == 1


def test_generator_states_are_those_when_the_window_opened() -> None:
    with recording() as sink:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        expected = torch.get_rng_state()
        model = nn.Dropout(0.5)
        model(torch.ones(3, requires_grad=True)).sum().backward()
    assert sink.names("rng") == ["cpu", "python", "numpy"]
    assert torch.equal(sink.one("rng", "cpu", "state"), expected)


def test_a_subclass_that_calls_the_step_of_its_base_steps_once() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step(closure)

    with recording() as sink:
        model = line()
        optimizer = Twice(model.parameters(), lr=0.1)
        model(torch.tensor([[2.0]])).sum().backward()
        optimizer.step()
    assert values(sink, "schedule", "optimizer.0", "skipped") == [0]


def test_a_step_that_raised_does_not_hide_the_next_one() -> None:
    class Once(torch.optim.SGD):
        fail = True

        def step(self, closure: None = None) -> None:
            if self.fail:
                self.fail = False
                raise RuntimeError("no")
            super().step(closure)

    with recording() as sink:
        model = line()
        optimizer = Once(model.parameters(), lr=0.1)
        model(torch.tensor([[2.0]])).sum().backward()
        with pytest.raises(RuntimeError, match="no"):
            optimizer.step()
        optimizer.step()
    assert values(sink, "schedule", "optimizer.0", "skipped") == [0]


def test_an_update_without_an_optimizer_ends_the_window() -> None:
    # The loss w·x has the gradient x: from 1 by steps of a tenth of 2 + 3, then of 4 + 5.
    with recording() as sink:
        model = line()
        for pair in ((2.0, 3.0), (4.0, 5.0)):
            for x in pair:
                model(torch.tensor([[x]])).sum().backward()
            model.weight.data.add_(model.weight.grad, alpha=-0.1)
            model.weight.grad = None
        assert sink.absences.keys() >= {"clipped_grad"}
    assert values(sink, "local_grad", "weight", "grad", microbatch=None) == [5.0, 9.0]
    assert values(sink, "local_grad", "weight", "grad", step=1, microbatch=1) == [5.0]
    assert values(sink, "param", "weight", "model") == pytest.approx([1.0, 0.5, -0.4], rel=1e-6)
    assert sink.find("param", "weight", "start") == []


def test_what_changes_between_microbatches_ends_no_window_where_there_is_an_optimizer() -> None:
    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            for x in (2.0, 3.0):
                model(torch.tensor([[x]])).sum().backward()
                if optimizer.state or sink.find("schedule"):
                    model.weight.data.mul_(0.5)
            optimizer.step()
    assert values(sink, "local_grad", "weight", "grad", microbatch=None) == [5.0, 5.0]
    assert "clipped_grad" not in sink.absences


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_settings_may_be_of_any_class() -> None:
    class Key(str):
        pass

    odd: dict[Any, Any] = {
        "lr": np.float32(0.5), "array": np.array(0.25), "decimal": Decimal("0.1"),
        "parts": (np.int64(3), None, "x"), Key("key"): 1.0, 7: 2.0, "huge": 10**400, "function": abs,
        "none": None, "complex": torch.tensor(1j),
        "history": [0.5] * 65, "bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
        "meta": torch.tensor(0.5, device="meta"), "sparse": torch.ones(1).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(1)]),
    }  # fmt: skip
    with recording() as sink:
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.param_groups[0].update(odd)
        for _ in range(2):
            model(torch.tensor([[1.0]])).sum().backward()
            optimizer.step()
            optimizer.state[model.weight] = {"count": np.int64(4), 5: 10**400, 6: 6.0, "meta": odd["meta"]}
    group = sink.find("schedule", "optimizer.0.group.0", step=0)
    own = {kept.boundary.slot: kept.value.item() for kept in group}
    usual = {"momentum", "dampening", "weight_decay", "nesterov", "maximize"}
    assert {slot: value for slot, value in own.items() if slot not in usual} == {
        "lr": 0.5, "array": 0.25, "decimal": 0.1, "parts.0": 3.0, "key": 1.0, "7": 2.0, "bfloat16": 0.5,
    }  # fmt: skip
    assert {kept.value.dtype for kept in group} == {torch.float64}
    assert set(sink.dropped) == {"a tensor without memory of its own", "not a strided tensor"}
    assert values(sink, "optimizer_state", "weight", "count") == [4.0]
    assert {kept.boundary.slot for kept in sink.find("optimizer_state")} == {"count", "6"}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_a_nested_tensor_is_dropped_and_said_to_be() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ragged = torch.nested.nested_tensor([x[:2], x[:1]])
            return torch.nested.to_padded_tensor(self.inner(ragged), 0.0)

    with recording() as sink:
        model = Ragged()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert set(sink.dropped) == {"not a strided tensor"}
    assert sink.names("activation") == ["(root)"]
    assert len(sink.find("clipped_grad")) == 2
