"""Optimizers that evaluate the model within their step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tensortrace.diff.result import Result
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind

STEPS = 3


class Halved(nn.Linear):
    """The same layer, whose products are summed in another order."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        left, right = self.weight[:, :half], self.weight[:, half:]
        return x[:, :half] @ left.T + (x[:, half:] @ right.T + self.bias)


def train(
    folder: Path,
    *,
    other: bool = False,
    keeps: bool = False,
    far: bool = False,
    chosen: Any,
    **settings: Any,
) -> Path:
    """Record steps on one batch; a closure that ``keeps`` gradients adds to them.

    ``other`` has the rows, and the terms of products, in another order. ``far`` has all scores near 100.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = chosen(model.parameters(), **settings)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    if far:
        model[2].bias.data += 100
    if other:
        x, y = x.flip(0), y.flip(0)
        for layer in model[::2]:
            layer.__class__ = Halved

    def closure() -> Tensor:
        if not keeps:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with tracer.record(folder, min_free="0", buffer="64MiB"):
        for _ in range(STEPS):
            optimizer.step(closure)
    return folder


LBFGS = {"chosen": torch.optim.LBFGS, "max_iter": 4}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("closures") / "a", lr=0.5, **LBFGS)


def place(result: Result) -> tuple[object, ...]:
    assert result.first_divergent is not None
    at = result.first_divergent.where
    return at.step, at.kind, at.name, at.slot


def test_what_a_quasi_newton_step_makes_of_round_off_is_no_divergence(
    tmp_path: Path, reference: Path
) -> None:
    result = compare(reference, train(tmp_path / "b", other=True, lr=0.5, **LBFGS))
    assert result.verdict == "equivalent", result.headline
    assert (
        result.coverage.by_kind["activation"] == STEPS * 4 * 8
    )  # evaluations × (3 modules, 1 root) × (in, out)


def test_a_rate_is_told_before_the_evaluations_that_it_leads_to(tmp_path: Path, reference: Path) -> None:
    result = compare(reference, train(tmp_path / "b", lr=0.45, **LBFGS))
    assert place(result) == (0, "schedule", "optimizer.0.group.0", "lr")
    assert [origin.where.kind for origin in result.origins] == ["schedule"] * STEPS


def test_a_closure_that_keeps_gradients_is_found(tmp_path: Path, reference: Path) -> None:
    result = compare(reference, train(tmp_path / "b", keeps=True, lr=0.5, **LBFGS))
    assert result.verdict == "divergent"
    assert place(result)[:2] in [(0, "activation"), (0, "clipped_grad"), (0, "optimizer_state")]


def test_what_an_optimizer_consumes_is_what_its_closure_made(tmp_path: Path) -> None:
    settings = {"chosen": torch.optim.AdamW, "lr": 1e-2}
    a, b = train(tmp_path / "a", **settings), train(tmp_path / "b", other=True, **settings)
    with Trace.open(a) as trace:
        [rank] = trace.ranks
        made = {
            (e.step, e.name): rank.read(e)
            for e in rank.entries
            if e.kind is Kind.LOCAL_GRAD and e.slot == "grad"
        }
        consumed = {(e.step, e.name): rank.read(e) for e in rank.entries if e.kind is Kind.CLIPPED_GRAD}
    assert len(consumed) == STEPS * 4
    assert all((made[key] == consumed[key]).all() for key in consumed)
    assert compare(a, b).verdict == "equivalent"


def test_a_softmax_of_scores_far_from_zero_errs_by_what_they_err_by_absolutely(tmp_path: Path) -> None:
    settings = {"chosen": torch.optim.SGD, "lr": 1e-2, "far": True}
    a, b = (train(tmp_path / name, other=name == "b", **settings) for name in "ab")
    result = compare(a, b)
    assert result.verdict == "equivalent", result.headline
