"""What a program may rightly do and no contract knows is not replayed; what it does too late is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad

from tensortrace import tracer
from tensortrace.replay import Replay, replay
from tensortrace.replay.clipping import BY_PROGRAM, LATE
from tensortrace.replay.contract import EVALUATED
from tensortrace.replay.objective import WEIGHTS_GIVEN

CLASSES = torch.arange(1.0, 6.0)

Between = Callable[[nn.Module], None]


def reasons(result: Replay, kind: str) -> set[str]:
    return {group.reason for group in result.not_replayed if group.kind == kind}


def batches(count: int) -> list[torch.Tensor]:
    values = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=values) for _ in range(count)]


def trained(folder: Path, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], passes: int = 1,
            before: Between = lambda model: None, after: Between = lambda model: None) -> Replay:  # fmt: skip
    """Replay two steps of a small model, with something done before each update or after it."""
    torch.manual_seed(0)
    with tracer.record(folder, min_free="0"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = batches(2 * passes)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                rows = given.pop()
                (loss(model(rows), rows.argmax(1)) / passes).backward()
            before(model)
            optimizer.step()
            after(model)
    return replay(folder)


def test_class_weights_of_several_passes_leave_the_denominator_open(tmp_path: Path) -> None:
    result = trained(tmp_path / "a", lambda s, y: F.cross_entropy(s, y, weight=CLASSES), passes=2)
    assert result.verdict == "agrees", result.headline
    assert WEIGHTS_GIVEN in reasons(result, "loss")


def masked_mean(*kept: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the mean of a pass's first tokens; ``kept`` are their numbers in each pass, in turn."""
    numbers = cycle(kept)

    def loss(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(8) < next(numbers)).float()
        return (F.cross_entropy(scores, classes, reduction="none") * mask).sum() / mask.sum()

    return loss


def test_tokens_that_the_program_masks_by_itself_are_not_valid(tmp_path: Path) -> None:
    result = trained(tmp_path / "a", masked_mean(5))
    assert result.verdict == "agrees", result.headline
    assert result.objective is not None
    assert "a token weighs 1/5" in result.objective.weights[0]
    apart = trained(tmp_path / "b", masked_mean(5, 3), passes=2)  # 1/10 and 1/6, where 1/8 is the mean
    assert apart.first_mismatch is not None
    assert (apart.first_mismatch.where.kind, apart.first_mismatch.where.slot) == ("loss", "weight")
    assert apart.causes[0].code == "scale.token_ratio", apart.headline


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_class_weights_of_the_only_call_are_torchs_mean(tmp_path: Path, times: float) -> None:
    result = trained(tmp_path / "a", lambda s, y: times * F.cross_entropy(s, y, weight=CLASSES))
    assert WEIGHTS_GIVEN not in reasons(result, "loss")
    assert result.verdict == ("agrees" if times == 1 else "mismatch"), result.headline


def test_a_mask_given_as_weight_is_no_mean_over_elements(tmp_path: Path) -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])

    def masked(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = (target > 1).float()
        lost = F.binary_cross_entropy_with_logits(scores[:, 0], wanted, weight=mask, reduction="sum")
        return lost / mask.sum()

    result = trained(tmp_path / "a", masked)
    assert result.verdict == "agrees", result.headline
    assert WEIGHTS_GIVEN in reasons(result, "loss")


def test_evaluations_within_an_update_are_no_microbatches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with tracer.record(tmp_path / "a", min_free="0"):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        for rows in batches(2):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(rows)[:, 0], rows.sum(1))
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            optimizer.step(closure)  # type: ignore[no-untyped-call]
    result = replay(tmp_path / "a")
    assert result.verdict == "agrees", result.headline
    assert EVALUATED in reasons(result, "loss") & reasons(result, "activation")
    assert result.replayed["activation"] == 2  # the first evaluation of each step


def test_gradients_moved_by_code_of_the_program_are_not_judged_by_a_fitted_factor(tmp_path: Path) -> None:
    def decayed(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(parameter, alpha=1e-5)

    result = trained(tmp_path / "a", F.cross_entropy, before=decayed)
    assert result.verdict == "agrees", result.headline
    assert BY_PROGRAM in reasons(result, "clipped_grad")


def test_one_gradient_among_many_is_still_named(tmp_path: Path) -> None:
    def doubled(model: nn.Module) -> None:
        gradient = model.get_parameter("0.weight").grad
        assert gradient is not None
        gradient.mul_(2)

    result = trained(tmp_path / "a", F.cross_entropy, before=doubled)
    assert result.verdict == "mismatch"
    assert result.first_mismatch is not None
    assert result.first_mismatch.where.name == "0.weight"


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_a_clip_after_the_update_is_named_where_it_clips(tmp_path: Path, limit: float) -> None:
    def clip(model: nn.Module) -> None:
        clip_grad.clip_grad_norm_(model.parameters(), limit)

    result = trained(tmp_path / "a", F.cross_entropy, after=clip)
    assert result.verdict == ("mismatch" if limit < 1 else "agrees"), result.headline
    assert (LATE in result.headline) == (limit < 1)
