"""A window of which nothing is wanted costs next to nothing, and later ones are as they would have been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensortrace.tracer.types import Kind
from tests.memory_sink import Kept, MemorySink, recording_into


@dataclass
class Choosing(MemorySink):
    """Wants some steps only, and counts how often it is asked in each."""

    chosen: frozenset[int] = frozenset()
    asked: list[int] = field(default_factory=list)

    def wants(self, kind: Kind, name: str, *, step: int) -> bool:
        self.asked.append(step)
        return step in self.chosen

    def wants_step(self, step: int) -> bool:
        return step in self.chosen


def choosing(*steps: int) -> AbstractContextManager[Choosing]:
    return recording_into(Choosing(chosen=frozenset(steps)), may_repeat=True)


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def train(model: nn.Module, steps: int, after: Callable[[int], object] = lambda step: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for rows in (2, 3):
            model(torch.ones(rows, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        after(step)


def plain(steps: int) -> None:
    train(layers(2), steps)


def without_optimizer(steps: int) -> None:
    model = layers(2)
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)


def growing(steps: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    train(model, steps, lambda step: model.append(nn.Linear(4, 4)) if step == 1 else None)


class Recomputed(nn.Module):
    """Recomputes a layer, and uses a module that it doesn't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Tanh()(checkpoint(self.layer, x, use_reentrant=False))


def recomputing(steps: int) -> None:
    train(Recomputed(), steps)


def scaled(steps: int) -> None:
    model, scaler = layers(2), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        scores = model(torch.ones(2, 4)) * (float("inf") if step == 1 else 1.0)
        scaler.scale(F.cross_entropy(scores, torch.tensor([0, 1]))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def with_closure(steps: int) -> None:
    model = layers(2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def late_backward(steps: int) -> None:
    """Each step's loss goes on into the graph of the step before."""
    model = layers(1)  # whose gradient needs no weight, which the optimizer has written to
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.0), torch.zeros(())
    for _ in range(steps):
        scores = model(torch.ones(2, 4))
        optimizer.zero_grad()
        (scores.sum() + before).backward(retain_graph=True)
        optimizer.step()
        before = scores.sum()


def told(kept: Kept) -> tuple[object, ...]:
    said = kept.boundary
    return said.key, said.recompute, said.meta, kept.value.tolist()


@pytest.mark.parametrize(
    "program", [plain, without_optimizer, growing, recomputing, scaled, with_closure, late_backward]
)
def test_steps_are_recorded_as_if_those_before_had_been(program: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    with choosing(*range(-1, 9)) as whole:
        program(5)
    torch.manual_seed(0)
    with choosing(3) as part:
        program(5)
    assert part.steps == whole.steps == list(range(5))
    expected = [told(kept) for kept in whole.kept if kept.boundary.step == 3]
    began = part.find("param", slot="start")
    found = [told(kept) for kept in part.kept if not any(kept is one for one in began)]
    assert _nan_safe(found) == _nan_safe(expected)
    assert began, "the parameters that the first recorded step begins with"


def _nan_safe(things: list[tuple[object, ...]]) -> list[str]:
    return [repr(thing) for thing in things]


def test_a_window_that_is_not_wanted_costs_as_much_for_many_layers_as_for_few() -> None:
    counts = []
    for count in (2, 20):
        with choosing(0) as sink:
            train(layers(count), 4)
        counts.append([sink.asked.count(step) for step in (1, 2)])
    assert counts[0] == counts[1]
    assert max(counts[0]) < 20


def test_no_hook_stays_on_a_parameter_in_a_window_that_is_not_wanted() -> None:
    model, seen = layers(2), []
    with choosing(0, 3):
        train(model, 5, lambda _: seen.append([len(p._backward_hooks or ()) for p in model.parameters()]))
    assert seen == [[1] * 4, [0] * 4, [0] * 4, [1] * 4, [0] * 4]


def test_hooks_are_taken_out_once_the_sink_stands_down() -> None:
    model, seen = layers(2), []
    with choosing(*range(-1, 9)) as sink:

        def after(step: int) -> None:
            seen.append([len(p._backward_hooks or ()) for p in model.parameters()])
            if step == 1:
                sink.active = False

        train(model, 4, after)
    assert seen == [[1] * 4, [1] * 4, [0] * 4, [0] * 4]
    assert {kept.boundary.step for kept in sink.kept} == {-1, 0, 1}
