"""Train an encoder that sees whole rows, padded to one length, and tells a class of each from the mean.

    python pooling.py
    torchrun --nproc-per-node 2 pooling.py --plant NAME

What is padding must be seen by no token and must not count in the mean.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--plant", default="")
    add("--at", type=int, default=0)
    add("--since", type=int, default=0)
    add("--steps", type=int, default=4)
    add("--seed", type=int, default=0)
    add("--heads", type=int, default=2)
    add("--width", type=int, default=12)
    add("--vocabulary", type=int, default=40)
    add("--length", type=int, default=10)
    add("--classes", type=int, default=5)
    add("--rows", type=int, default=8)
    return parser.parse_args()


class Mixing(nn.Module):
    """Scaled dot products of [rows, heads, positions, head_dim], over tokens that are not padding."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.plant != "padding-attended":
            scores = scores.masked_fill(mask[:, None, None] == 0, -math.inf)
        return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.heads = options.heads
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.mixing = Mixing(plant)
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.mixing(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.attention = Attention(options, plant)
        self.mlp = nn.Sequential(nn.Linear(options.width, 21), nn.GELU(), nn.Linear(21, options.width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class Pool(nn.Module):
    """The mean over tokens, [rows, width]."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.plant == "padding-pooled":
            return x.mean(1)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Encoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(
            Block(options, options.plant if n == options.at else "") for n in range(2)
        )
        self.norm = nn.LayerNorm(options.width)
        self.pool = Pool(options.plant)
        self.classes = nn.Linear(options.width, options.classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.classes(self.pool(self.norm(x), mask))


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens, their mask and the classes, padded to the longest row of all ranks."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    tokens = torch.randint(1, options.vocabulary, (options.rows, options.length), generator=drawn)
    lengths = torch.randint(3, options.length, (options.rows,), generator=drawn)
    classes = torch.randint(0, options.classes, (options.rows,), generator=drawn)
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return (tokens[:, : mask.shape[1]] * mask)[RANK::WORLD], mask[RANK::WORLD], classes[RANK::WORLD]


def main() -> None:
    options = arguments()
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    inner = Encoder(options)
    model: nn.Module = DistributedDataParallel(inner) if WORLD > 1 else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(options.steps):
        tokens, mask, classes = batch(options, step)
        F.cross_entropy(model(tokens, mask), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if options.plant == "momentum-restarted" and step + 1 == options.since:
            optimizer.state.clear()  # a layer was unfrozen, and the optimizer made anew
        if options.plant == "scheduled-twice" and step + 1 == options.since:
            scheduler.step()  # at the end of an epoch, too
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
