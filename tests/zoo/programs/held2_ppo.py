"""Train an actor and a critic by proximal policy optimisation on a small linear world.

    python held2_ppo.py
    torchrun --nproc-per-node 2 held2_ppo.py --plant NAME

Every world's noise comes from a generator of its own. A batch of experience is used for several updates, each
of which takes some of the moments of all worlds.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn

EPOCHS, PARTS = 2, 2


class LogProbability(nn.Module):
    """The logarithm of a normal distribution's density, summed over the parts of an action."""

    def forward(self, action: Tensor, mean: Tensor, log_width: Tensor) -> Tensor:
        distance = (action - mean) / log_width.exp()
        return (-0.5 * distance.square() - log_width - 0.5 * math.log(2 * math.pi)).sum(-1)


class Actor(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(options.features, options.width), nn.Tanh())
        self.mean = nn.Linear(options.width, options.actions)
        self.log_width = nn.Parameter(torch.full((options.actions,), -0.4))
        self.logp = LogProbability()

    def forward(self, seen: Tensor, noise: Tensor | None = None, action: Tensor | None = None) -> Tensor:
        """Return the actions that noise makes, or the log-probability of actions."""
        mean = self.mean(self.body(seen))
        if noise is not None:
            return mean + self.log_width.exp() * noise
        return self.logp(action, mean, self.log_width)


class Critic(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(options.features, options.width + 3), nn.Tanh())
        self.value = nn.Linear(options.width + 3, 1)

    def forward(self, seen: Tensor) -> Tensor:
        return self.value(self.body(seen)).squeeze(-1)


class PolicyLoss(nn.Module):
    """What each moment loses, by the ratio of its probabilities under the new and the old policy."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.plant, self.quotient = options.plant, options.quotient

    def forward(self, new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        ratio = new.exp() / old.exp() if self.quotient else (new - old).exp()
        if self.plant == "ratio-reversed":
            ratio = (old - new).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@dataclass(frozen=True)
class Experience:
    """Moments of this rank's worlds: [worlds, moments, ...]."""

    seen: Tensor
    action: Tensor
    advantage: Tensor
    returned: Tensor


def mean_of_all(x: Tensor) -> Tensor:
    """Return the mean over the elements of all ranks."""
    mean = x.mean()
    if WORLD > 1:
        dist.all_reduce(mean)
    return mean / WORLD


def experience(options: argparse.Namespace, actor: nn.Module, critic: nn.Module, number: int) -> Experience:
    """Let the actor act in this rank's worlds, a block of all, and estimate its advantages (GAE)."""
    dtype, base = torch.get_default_dtype(), options.seed * 1000 + number * 100
    drawn = torch.Generator().manual_seed(options.seed)
    drift = torch.randn(options.features, options.features, generator=drawn).to(dtype) * 0.3
    push = torch.randn(options.actions, options.features, generator=drawn).to(dtype)
    mine = torch.arange(options.worlds).chunk(WORLD)[RANK].tolist()
    own = [torch.Generator().manual_seed(base + world) for world in mine]

    def noise(size: int) -> Tensor:
        return torch.stack([torch.randn(size, generator=generator) for generator in own]).to(dtype)

    seen, action, reward = [noise(options.features)], [], []
    with torch.no_grad():
        for _ in range(options.moments):
            action.append(actor(seen[-1], noise(options.actions)))
            seen.append(torch.tanh(seen[-1] @ drift + action[-1] @ push) + 0.1 * noise(options.features))
            reward.append(-seen[-1].square().mean(-1) - 0.01 * action[-1].square().sum(-1))
        states = torch.stack(seen, 1)
        value = critic(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        advantages, last = [], torch.zeros(len(mine))
        for moment in reversed(range(options.moments)):
            surprise = reward[moment] + 0.97 * value[:, moment + 1] - value[:, moment]
            last = surprise + 0.97 * 0.95 * last
            advantages.append(last)
        advantage = torch.stack(advantages[::-1], 1)
        returned = advantage + value[:, :-1]
        advantage = advantage - mean_of_all(advantage)
        advantage = advantage / (mean_of_all(advantage.square()).sqrt() + 1e-8)
    return Experience(states[:, :-1], torch.stack(action, 1), advantage, returned)


def part_of(x: Tensor, part: int) -> Tensor:
    """Return some of the moments of each world, one after the other."""
    return x[:, part::PARTS].flatten(0, 1)


def old_log_probabilities(options: argparse.Namespace, actor: nn.Module, had: Experience) -> Tensor:
    with torch.no_grad():
        old = torch.stack([actor(part_of(had.seen, p), action=part_of(had.action, p)) for p in range(PARTS)])
    return old.half().to(old.dtype) if options.plant == "kept-in-half" else old.clone()


def optimizers(
    options: argparse.Namespace, actor: nn.Module, critic: nn.Module
) -> list[torch.optim.Optimizer]:
    if options.together:
        groups = [{"params": list(actor.parameters())}, {"params": list(critic.parameters()), "lr": 6e-3}]
        return [torch.optim.Adam(groups, lr=4e-3, eps=1e-5)]
    return [
        torch.optim.Adam(actor.parameters(), lr=4e-3, eps=1e-5),
        torch.optim.Adam(critic.parameters(), lr=6e-3, eps=1e-5),
    ]


def main() -> None:
    options = arguments(
        __doc__, "quotient", "together", "narrow",
        steps=2, width=14, features=5, actions=2, worlds=8, moments=6,
    )  # fmt: skip
    with ranks(options):
        actor, critic = replicated(Actor(options)), Critic(options)
        trained = critic if options.plant == "critic-unwrapped" else replicated(critic)
        loss_of, updating, update = PolicyLoss(options), optimizers(options, actor, critic), 0
        for number in range(options.steps):
            had = experience(options, actor, trained, number)
            old = old_log_probabilities(options, actor, had)
            for part in (p for _ in range(EPOCHS) for p in range(PARTS)):
                seen = part_of(had.seen, part)
                new = actor(seen, action=part_of(had.action, part))
                policy = loss_of(new, old[part], part_of(had.advantage, part)).mean()
                value = F.mse_loss(trained(seen), part_of(had.returned, part))
                (policy + 0.5 * value).backward()
                limit = 0.5
                if options.narrow and update >= options.since and options.plant != "limit-kept":
                    limit = 0.1
                nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], limit)
                for optimizer in updating:
                    optimizer.step()
                    optimizer.zero_grad()
                update += 1


if __name__ == "__main__":
    main()
