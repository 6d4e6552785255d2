"""Gradients of parameters that a module uses itself are allowed the round-off of what they sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.diff import compare

ROWS, LENGTH, WIDTH = 8, 5, 16


class Table(nn.Module):
    """Adds a table of positions to what a layer makes, and hands the sum to another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) + self.table))


class Unused(nn.Module):
    """Multiplies by the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x) @ self.middle.weight + self.middle.bias))


def record(path: Path, made: type[nn.Module], parts: int) -> Path:
    """Train one step on rows whose gradients all but cancel, in ``parts`` microbatches.

    Of each pair of equal rows one misses its target by as much as the other, but for a millionth, to the
    other side; the last layer makes these gradients thousands of times larger.
    """
    torch.manual_seed(1)
    model = made()
    with torch.no_grad():
        model.last.weight *= 3000
        x = torch.randn(ROWS // 2, LENGTH, WIDTH).repeat_interleave(2, 0)
        miss = torch.tensor([1.0, -1.0 + 2.0**-20]).repeat(ROWS // 2)
        target = model(x) + miss[:, None, None] * torch.rand(ROWS // 2, LENGTH, WIDTH).repeat_interleave(2, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(str(path), min_free="0"):
        for rows, wanted in zip(x.chunk(parts), target.chunk(parts), strict=True):
            F.mse_loss(model(rows), wanted, reduction="sum").backward()
        optimizer.step()
    return path


@pytest.mark.parametrize("made", [Table, Unused])
def test_a_sum_that_cancels_is_no_divergence(tmp_path: Path, made: type[nn.Module]) -> None:
    whole = record(tmp_path / "whole", made, 1)
    for parts in (2, 8):
        result = compare(whole, record(tmp_path / f"{parts}", made, parts))
        assert result.verdict == "equivalent", result.headline
