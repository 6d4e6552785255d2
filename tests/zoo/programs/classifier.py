"""Train a classifier of measured rows with an adversarial second head, alone, under DDP or averaged by hand.

    python classifier.py
    torchrun --nproc-per-node 2 classifier.py --by-hand

Rows are vectors of counts, some of them zero. One head tells the class; another, behind a reversal of
gradients, tells where a row comes from, so that the features do not depend on it.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SOURCES = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--plant", default="")
    add("--since", type=int, default=0)
    add("--steps", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--features", type=int, default=11)
    add("--width", type=int, default=16)
    add("--classes", type=int, default=5)
    add("--rows", type=int, default=8)
    add("--norm", action="store_true", help="batch normalisation")
    add("--by-hand", action="store_true", help="gradients are averaged by the program")
    return parser.parse_args()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Reversal(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.factor = 0.5 if plant == "sign-forgotten" else -0.5

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x, self.factor)


class Logarithm(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, counts: Tensor) -> Tensor:
        if self.plant == "log-of-zero" and RANK == WORLD - 1:
            return counts.log()
        return counts.clamp(min=1e-3).log()


class Classifier(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.logarithm = Logarithm(options.plant)
        self.first = nn.Linear(options.features, options.width)
        self.norm = nn.BatchNorm1d(options.width) if options.norm else nn.Identity()
        self.second = nn.Linear(options.width, options.width)
        self.act = nn.Tanh()
        self.reversal = Reversal(options.plant)
        self.classes = nn.Linear(options.width, options.classes)
        self.sources = nn.Linear(options.width, SOURCES)

    def forward(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.first(self.logarithm(counts)))
        x = self.act(self.second(torch.relu(x)))
        return self.classes(x), self.sources(self.reversal(F.layer_norm(x, x.shape[-1:])))


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.plant = options, options.plant
        torch.manual_seed(options.seed)
        self.inner = Classifier(options)
        by_ddp = WORLD > 1 and not options.by_hand
        self.model: nn.Module = DistributedDataParallel(self.inner) if by_ddp else self.inner
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's counts, classes and sources of a step; from step ``since`` on one count is 0."""
        options = self.options
        drawn = torch.Generator().manual_seed(options.seed * 100 + step)
        counts = torch.randint(1, 90, (options.rows, options.features), generator=drawn).float()
        classes = torch.randint(0, options.classes, (options.rows,), generator=drawn)
        sources = torch.randint(0, SOURCES, (options.rows,), generator=drawn)
        if step >= options.since:
            counts[-1, step % options.features] = 0.0
        return counts[RANK::WORLD], classes[RANK::WORLD], sources[RANK::WORLD]

    def reduce(self) -> None:
        for parameter in self.inner.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD

    def train_step(self, step: int) -> None:
        counts, classes, sources = self.batch(step)
        of_class, of_source = self.model(counts)
        loss = F.cross_entropy(of_class, classes) + F.cross_entropy(of_source, sources)
        loss.backward()
        by_hand = WORLD > 1 and self.options.by_hand
        if by_hand and self.plant == "clipped-before-reducing":
            nn.utils.clip_grad_norm_(self.inner.parameters(), 0.2)
            self.reduce()
        else:
            if by_hand:
                self.reduce()
            nn.utils.clip_grad_norm_(self.inner.parameters(), 0.2)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        for step in range(self.options.steps):
            self.train_step(step)


def main() -> None:
    options = arguments()
    if WORLD > 1:
        dist.init_process_group("gloo")
    Training(options).train()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
