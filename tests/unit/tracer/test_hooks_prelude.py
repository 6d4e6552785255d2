"""What other models compute before the first step belongs to that step; evaluations before it do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace.tracer.hooks import prelude
from tensortrace.tracer.types import INIT_STEP
from tests.memory_sink import MemorySink, recording


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.lin(x))


class Distillation:
    """A student that is trained on a frozen teacher's outputs."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.teacher = Teacher().requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1)

    def look(self, model: nn.Module, rows: int = 2) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.randn(rows, 3))

    def step(self) -> None:
        batch = torch.randn(2, 3)
        with torch.no_grad():
            wanted = self.teacher(batch)
        F.mse_loss(self.student(batch), wanted).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def passes(sink: MemorySink, name: str) -> list[tuple[int, int | None, int]]:
    """Return (step, microbatch, call) of each output kept under a name, those before any step left out."""
    kept = [k.boundary for k in sink.find("activation", name, "out")]
    return [(b.step, b.microbatch, b.call) for b in kept if b.step != INIT_STEP]


def test_a_teachers_pass_before_the_first_forward_is_an_eval_pass_of_the_first_step() -> None:
    with recording() as sink:
        run = Distillation()
        run.step()
        run.step()
    assert passes(sink, "Teacher") == [(0, None, 0), (0, None, 1)]  # the second one before step 1 begins
    first = sink.find("activation", "Teacher.lin", "out", step=0)[0]
    given = sink.find("activation", "Teacher.lin", "in.0", step=0)[0]
    assert torch.equal(first.value, run.teacher.lin(given.value))
    assert first.boundary.producers == (given.boundary.event,)
    assert first.boundary.meta.grad_enabled is False
    root = sink.find("input", "Teacher", "in.0", step=0)[0]
    init = [k.boundary.event for k in sink.kept if k.boundary.step == INIT_STEP]
    assert root.boundary.event > max(init)
    assert torch.equal(root.value, sink.one("input", "(root)", "in.0", step=0))


def test_what_the_trained_model_evaluates_before_the_first_step_is_not_kept() -> None:
    with recording() as sink:
        run = Distillation()
        for _ in range(3):
            run.look(run.teacher)
            run.look(run.student)
        run.step()
    assert passes(sink, "Teacher") == [(0, None, 0)]
    assert passes(sink, "(root)") == [(0, 0, 0)]


@pytest.mark.parametrize("count", [prelude.MOST_PASSES, prelude.MOST_PASSES + 1, 200])
def test_a_loop_over_many_batches_is_no_part_of_a_step(count: int) -> None:
    with recording() as sink:
        run = Distillation()
        for _ in range(count - 1):
            run.look(run.teacher)
        run.step()
    kept = count if count <= prelude.MOST_PASSES else 0
    assert passes(sink, "Teacher") == [(0, None, call) for call in range(kept)]


def test_so_many_bytes_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prelude, "MOST_BYTES", 1000)
    with recording() as sink:
        run = Distillation()
        run.look(run.teacher, rows=40)  # 480 bytes of input alone, and 320 of each output
        run.step()
    assert passes(sink, "Teacher") == []
    assert passes(sink, "(root)") == [(0, 0, 0)]


def test_a_program_that_never_trains_leaves_nothing() -> None:
    with recording() as sink:
        run = Distillation()
        run.look(run.teacher)
    assert sink.kept == []


def test_a_later_writing_to_what_was_kept_changes_nothing() -> None:
    with recording() as sink:
        run = Distillation()
        batch = torch.ones(2, 3)
        with torch.no_grad():
            wanted = run.teacher(batch).mul_(0)
        F.mse_loss(run.student(batch), wanted).backward()
        run.optimizer.step()
    assert sink.find("activation", "Teacher.lin", "out", step=0)[0].value.abs().sum() > 0
    assert sink.one("activation", "Teacher", "out", step=0).abs().sum() > 0


class Adversaries:
    """A critic that learns from what its generator computes without gradients, before any step."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.maker, self.critic = Teacher(), nn.Sequential(nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.critic.parameters(), lr=0.1)
        self.other = torch.optim.SGD(self.maker.parameters(), lr=0.1)

    def step(self) -> None:
        with torch.no_grad():
            made = self.maker(torch.ones(2, 3))
        self.critic(made).sum().backward()
        self.optimizer.step()


def test_what_another_model_in_training_mode_computes_for_the_first_forward_belongs_to_its_step() -> None:
    with recording() as sink:
        Adversaries().step()
    assert passes(sink, "(root)") == [(0, None, 0)]
    assert passes(sink, "Sequential") == [(0, 0, 0)]


def test_what_another_model_evaluates_before_the_first_step_is_not_kept() -> None:
    with recording() as sink:
        run = Adversaries()
        run.maker.eval()
        run.step()
    assert passes(sink, "(root)") == []
