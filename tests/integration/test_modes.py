"""A module of one run that is in another mode is told so, whatever the mode changes in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tests.integration.judged import codes, place


def train(trace: Path, frozen: tuple[int, ...] = (), *, eps: float = 1e-5) -> Path:
    """Train two batch norms for three steps; in ``frozen`` steps the second one is in evaluation mode."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=eps), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 4, 3),
    )  # fmt: skip
    with torch.no_grad():
        model[4].weight.uniform_(0.5, 1.5)
        model[4].bias.uniform_(-0.5, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tracer.record(trace):
        for step in range(3):
            model[4].train(step not in frozen)
            images, labels = torch.randn(6, 2, 6, 6), torch.randint(3, (6,))
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trace


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_a_batch_norm_left_in_evaluation_mode(tmp_path: Path, eps: float) -> None:
    a, b = train(tmp_path / "a", eps=eps), train(tmp_path / "b", (1,), eps=eps)
    result = compare(a, b)
    assert place(result) == (1, 0, "activation", "4", "out")
    assert codes(result) == ["mode.training"]
    assert result.causes[0].text == "BatchNorm2d 4 is in evaluation mode in b, in training mode in a"
    assert result.causes[0].residual_after < 1e-5
    mirrored = compare(b, a)
    assert place(mirrored) == (1, 0, "activation", "4", "out")
    assert codes(mirrored) == ["mode.training"]
    assert mirrored.causes[0].text == "BatchNorm2d 4 is in training mode in b, in evaluation mode in a"
