"""What backward began with: another term is told there, another value of equal gradients is no difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tests.integration.judged import assert_equivalent, codes, place

ROWS, STEPS = 8, 3
Penalty = Callable[[torch.Tensor], torch.Tensor]


def two_sided(norms: torch.Tensor) -> torch.Tensor:
    return 10 * ((norms - 1) ** 2).mean()


def lighter(norms: torch.Tensor) -> torch.Tensor:
    return ((norms - 1) ** 2).mean()


def one_sided(norms: torch.Tensor) -> torch.Tensor:
    return 10 * (torch.relu(norms - 1) ** 2).mean()


def adversaries(trace: Path, *, parts: int = 1, later: Penalty = two_sided) -> Path:
    """Train a critic with a gradient penalty (Gulrajani et al. 2017), and its generator.

    From the critic's second step on its penalty is ``later``.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.05)
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.05)
    data = [[torch.randn(ROWS, n) for n in (6, 4, 1, 4)] for _ in range(STEPS)]
    with tracer.record(trace):
        for step, (all_real, all_noise, all_shares, more_noise) in enumerate(data):
            penalty = later if step else two_sided
            of_critic.zero_grad()
            pieces = zip(*(x.chunk(parts) for x in (all_real, all_noise, all_shares)), strict=True)
            for real, noise, share in pieces:
                with torch.no_grad():
                    fake = maker(noise)
                between = (share * real + (1 - share) * fake).requires_grad_()
                (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                loss = critic(fake).mean() - critic(real).mean() + penalty(gradient.norm(dim=1))
                (loss / parts).backward()
            of_critic.step()
            of_maker.zero_grad()
            (-critic(maker(more_noise)).mean()).backward()
            of_maker.step()
    return trace


def test_a_gradient_penalty_in_two_microbatches_is_the_same(tmp_path: Path) -> None:
    assert_equivalent(compare(adversaries(tmp_path / "a"), adversaries(tmp_path / "b", parts=2)))


@pytest.mark.parametrize(("penalty", "code"), [(lighter, "scale.other"), (one_sided, "value.zero")])
def test_another_penalty_is_told_where_backward_began(tmp_path: Path, penalty: Penalty, code: str) -> None:
    # The critic's steps are 0, 2, 4. Its penalty's gradient comes from no other one; the norms are below 1,
    # so that the one-sided penalty is 0.
    result = compare(adversaries(tmp_path / "a"), adversaries(tmp_path / "b", later=penalty))
    assert place(result) == (2, 0, "loss", "backward", "value")
    assert codes(result) == [code]
    assert not [o for o in result.origins if o.where.step == 2 and o.where.kind.endswith("grad")]


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


Objective = Callable[[torch.Tensor], torch.Tensor]


def plain(scores: torch.Tensor) -> torch.Tensor:
    return (scores.square().sum(1) * torch.arange(1.0, 9.0)).mean()


def surrogate(scores: torch.Tensor) -> torch.Tensor:
    value = scores.square().sum(1)
    return ((value - value.detach() + 1) * torch.arange(1.0, 9.0)).mean()


def policy(trace: Path, objective: Objective, *, twisted: bool = False) -> Path:
    """Train on an objective; a twisted run turns the gradient that the last layer hands on."""
    torch.manual_seed(0)
    model = Policy()
    if twisted:
        model.head.register_full_backward_hook(lambda _, given, __: (given[0] * 1.5,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.randn(2, ROWS, 5)
    with tracer.record(trace):
        for x in data:
            optimizer.zero_grad()
            objective(model(x)).backward()
            optimizer.step()
    return trace


def test_a_surrogate_of_another_value_and_the_same_gradient_is_no_difference(tmp_path: Path) -> None:
    assert_equivalent(compare(policy(tmp_path / "a", plain), policy(tmp_path / "b", surrogate)))


def test_another_value_is_not_blamed_for_what_begins_after_gradients_that_agree(tmp_path: Path) -> None:
    result = compare(policy(tmp_path / "a", plain), policy(tmp_path / "b", surrogate, twisted=True))
    assert place(result)[:3] == (0, 0, "activation_grad")
    assert place(result)[3] in ("head", "body")
