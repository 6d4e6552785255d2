"""Losses are judged at the precision at which they computed; gradients that overflow under a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tensortrace.diff.result import Result

TOKENS, WIDTH, CLASSES = 24, 32, 40
OVERFLOWS = 2.0**24
"""Times (p − 1) / 192 it exceeds 65504, the largest float16, where p < 0.25: of every label."""

Loss = Callable[[Tensor, Tensor], Tensor]


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def train(
    folder: Path,
    loss: Loss = plain,
    *,
    weights: Sequence[float] = (1.0,),
    scale: float = 0.0,
    spoilt: int | None = None,
) -> Path:
    """Record three steps under autocast; a step's rows come in as many microbatches as there are weights.

    With a loss ``scale`` it is float16. The gradient of the step ``spoilt`` is not a number in one place.
    """
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES)
    model = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", scale or 1.0, backoff_factor=2.0**-12, enabled=scale > 0)
    with tracer.record(folder, min_free="0", buffer="64MiB"):
        for step in range(3):
            x, y = torch.randint(0, 50, (8, TOKENS)), torch.randint(0, CLASSES, (8, TOKENS))
            parts = len(weights)
            for weight, rows, labels in zip(weights, x.chunk(parts), y.chunk(parts), strict=True):
                with torch.autocast("cpu", torch.float16 if scale else torch.bfloat16):
                    logits = model(rows)
                    value = loss(logits.flatten(0, 1), labels.flatten())
                scaler.scale(value * weight).backward()
            assert head.weight.grad is not None
            if step == spoilt:
                head.weight.grad[0, 0] = torch.nan
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("precision") / "a")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("precision") / "a", scale=OVERFLOWS)


def place(result: Result) -> tuple[object, ...]:
    assert result.first_divergent is not None
    at = result.first_divergent.where
    return at.step, at.kind, at.name, at.slot


def test_a_loss_in_float32_on_logits_cast_up_is_legal(tmp_path: Path, reference: Path) -> None:
    def cast(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(logits.float(), labels)

    result = compare(reference, train(tmp_path / "b", cast, weights=(0.5, 0.5)))
    assert result.verdict == "equivalent", result.headline


def test_a_label_smoothing_far_below_the_spacing_of_bfloat16_is_seen(tmp_path: Path, reference: Path) -> None:
    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, label_smoothing=0.02)

    result = compare(reference, train(tmp_path / "b", smoothed))
    assert result.verdict == "divergent"
    assert place(result)[:3] in [(0, "loss", "cross_entropy"), (0, "activation_grad", "(root)")]


def test_weights_of_tokens_that_are_a_few_percent_off_are_seen(tmp_path: Path, reference: Path) -> None:
    result = compare(reference, train(tmp_path / "b", weights=(0.5075, 0.4925)))
    assert place(result) == (0, "loss", "cross_entropy", "weight")


def test_gradients_that_overflow_elsewhere_in_a_step_that_both_skip_are_legal(
    tmp_path: Path, scaled: Path
) -> None:
    result = compare(scaled, train(tmp_path / "b", scale=2 * OVERFLOWS))
    assert result.verdict == "equivalent", result.headline
    assert any("both runs skipped the update" in note for note in result.notes)


def test_a_step_that_one_run_skips_is_named(tmp_path: Path, scaled: Path) -> None:
    result = compare(scaled, train(tmp_path / "b", scale=2 * OVERFLOWS, spoilt=1))
    assert place(result)[:2] in [(1, "unscaled_grad"), (1, "clipped_grad"), (1, "schedule")]
