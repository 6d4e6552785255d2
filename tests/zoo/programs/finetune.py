"""Fine-tune a frozen trunk with low-rank adapters and two heads: a class and a number for each row."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--features", type=int, default=10)
    parser.add_argument("--width", type=int, default=21)
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--adapter", choices=["apart", "together"], default="apart")
    parser.add_argument("--trunk", choices=["graph", "no-grad"], default="graph")
    parser.add_argument("--backward", choices=["once", "twice"], default="once")
    return parser.parse_args()


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two thin ones."""

    def __init__(self, given: int, made: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.base = nn.Linear(given, made)
        self.down = nn.Parameter(torch.randn(options.rank, given) / given**0.5)
        self.up = nn.Parameter(torch.randn(made, options.rank) * 0.1)
        self.adapter = options.adapter

    def forward(self, x: Tensor) -> Tensor:
        if self.adapter == "together":
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.trunk = nn.Sequential(
            nn.Linear(options.features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.adapted = nn.ModuleList(Adapted(width, width, options) for _ in range(2))
        self.classes = nn.Linear(width, 5)
        self.number = nn.Linear(width, 1)
        self.detached = options.trunk == "no-grad"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(not self.detached):
            x = self.trunk(x)
        for layer in self.adapted:
            x = F.silu(layer(x))
        return self.classes(x), self.number(x)[:, 0]


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model = Model(options)
    for frozen in [model.trunk, *(layer.base for layer in model.adapted)]:
        frozen.requires_grad_(False)
    trained: nn.Module = DistributedDataParallel(model) if world > 1 else model
    thin = [p for layer in model.adapted for p in (layer.down, layer.up)]
    heads = [*model.classes.parameters(), *model.number.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": thin}, {"params": heads, "lr": 1e-2, "weight_decay": 0.0}], lr=3e-3
    )
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in range(options.steps):
        x = torch.randn(options.rows, options.features, generator=generator)
        classes, numbers = x.abs().argmax(1) % 5, x.sum(1)
        share = slice(rank * options.rows // world, (rank + 1) * options.rows // world)
        parts = [t[share].chunk(options.microbatches) for t in (x, classes, numbers)]
        for some, of, near in zip(*parts, strict=True):
            scores, guess = trained(some)
            share_of = 1 / options.microbatches
            losses = [F.cross_entropy(scores, of) * share_of, 0.3 * F.mse_loss(guess, near) * share_of]
            if options.backward == "twice":
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                sum(losses).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.8)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
