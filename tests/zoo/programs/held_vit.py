"""Train a small vision transformer with label smoothing and an average of its weights.

python held_vit.py
torchrun --nproc-per-node 2 held_vit.py --plant NAME
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Patches(nn.Module):
    """Cuts images into patches, each a token: [rows, patches, width]."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.size, self.unfold, self.plant = options.patch, options.unfold, options.plant
        self.weight = nn.Parameter(torch.randn(options.width, 3, self.size, self.size) * 0.2)
        self.bias = nn.Parameter(torch.randn(options.width) * 0.1)

    def forward(self, images: Tensor) -> Tensor:
        if self.unfold:
            cut = F.unfold(images, self.size, stride=self.size).transpose(1, 2)
            return cut @ self.weight.flatten(1).T + self.bias
        maps = F.conv2d(images, self.weight, self.bias, stride=self.size)
        if self.plant == "patches-reshaped":
            return maps.reshape(len(maps), -1, maps.shape[1])
        return maps.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.patches = Patches(options)
        self.first = nn.Parameter(torch.randn(1, 1, options.width) * 0.1)
        self.place = nn.Parameter(torch.randn(1, 13, options.width) * 0.1)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(2))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's images, of 3 x 4 patches, and their classes."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    images = torch.randn(options.rows, 3, 3 * options.patch, 4 * options.patch, generator=drawn)
    classes = torch.randint(0, options.classes, (options.rows,), generator=drawn)
    return images[RANK::WORLD], classes[RANK::WORLD]


def objective(options: argparse.Namespace, scores: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross entropy against targets of which a tenth is spread over all classes."""
    if options.soft_targets:
        targets = F.one_hot(classes, options.classes) * 0.9 + 0.1 / options.classes
        return F.cross_entropy(scores, targets)
    return F.cross_entropy(scores, classes, label_smoothing=0.1)


def main() -> None:
    options = arguments(
        __doc__, "unfold", "soft-targets", "evaluate",
        heads=2, width=12, patch=3, classes=6, rows=8,
    )  # fmt: skip
    with ranks(options):
        inner = Vision(options)
        model = replicated(inner)
        average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
        for step in range(options.steps):
            images, classes = batch(options, step)
            before = [value.detach().clone() for value in inner.parameters()]
            loss = objective(options, model(images), classes)
            if options.plant == "loss-summed":
                loss = all_reduce(loss)  # so that every rank logs the same number
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(inner)
            if options.evaluate:  # with the average in the model's place
                kept = [value.detach().clone() for value in inner.parameters()]
                if options.plant == "restored-too-old" and step + 1 == options.since:
                    kept = before
                with torch.no_grad():
                    for value, averaged in zip(inner.parameters(), average.module.parameters(), strict=True):
                        value.copy_(averaged)
                    inner(batch(options, 90)[0])
                    for value, own in zip(inner.parameters(), kept, strict=True):
                        value.copy_(own)


if __name__ == "__main__":
    main()
