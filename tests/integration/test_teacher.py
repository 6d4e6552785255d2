"""A frozen teacher's passes: a mistake in them is told in its own step, another split of them is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tests.integration.judged import codes, place


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.drop, self.head = nn.Embedding(11, 8), nn.Dropout(0.3), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.emb(ids))))


class Frozen(Net):
    """A network of another name."""


def train(trace: Path, *, parts: int = 1, teacher_trains: bool = False, evaluates: bool = False) -> Path:
    """Train a student on a teacher's outputs for three steps, in so many microbatches."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    student, teacher = Net(), Frozen().requires_grad_(False)
    student.drop.p = 0.0
    teacher.train(teacher_trains)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    batches = torch.randint(11, (3, 8, 5))
    with tracer.record(trace):
        if evaluates:
            with torch.no_grad():
                for _ in range(3):
                    F.mse_loss(student(batches[0]), teacher(batches[1]))
        for batch in batches:
            for ids in batch.chunk(parts):
                with torch.no_grad():
                    wanted = teacher(ids).log_softmax(-1)
                loss = F.kl_div(
                    student(ids).log_softmax(-1), wanted, reduction="sum", log_target=True
                )  # fmt: skip
                (loss / batch.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace


def test_a_teacher_in_training_mode_is_told_in_the_first_step(tmp_path: Path) -> None:
    result = compare(train(tmp_path / "a"), train(tmp_path / "b", teacher_trains=True))
    assert place(result)[:1] + place(result)[2:] == (0, "activation", "Frozen.drop", "out")
    assert codes(result)[0] == "mode.training"


@pytest.mark.parametrize("change", [{"parts": 2}, {"evaluates": True}])
def test_another_split_or_an_evaluation_before_the_training_is_no_difference(
    tmp_path: Path, change: dict[str, int]
) -> None:
    result = compare(train(tmp_path / "a"), train(tmp_path / "b", **change))
    assert result.verdict == "equivalent", (result.headline, result.coverage.missing)
