"""Train a denoiser: each row's noise and time come from a generator of the row's own number.

    python held_denoise.py
    torchrun --nproc-per-node 2 held_denoise.py --plant NAME

The last batch has five rows; the error is a mean over the elements of all ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn


class Block(nn.Module):
    """Features that the time shifts and scales, behind a norm without parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.time = nn.Linear(8, 2 * width)
        self.rise, self.fall = nn.Linear(width, 27), nn.Linear(27, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time).chunk(2, -1)
        return x + self.fall(F.silu(self.rise(self.norm(x) * (1 + scale) + shift)))


class Denoiser(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.register_buffer("speeds", 2.0 ** torch.arange(4))
        self.enter = nn.Linear(options.features, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(2))
        self.leave = nn.Linear(options.width, options.features)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        angles = time[:, None] * self.speeds
        waves = torch.cat([angles.sin(), angles.cos()], -1)
        x = self.enter(noisy)
        for block in self.blocks:
            x = block(x, waves)
        return self.leave(x)


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return this rank's noisy rows, their times and noises, and how many rows all ranks have."""
    many = 5 if step == options.steps - 1 else options.rows
    rows = []
    for place, row in enumerate(range(RANK, many, WORLD)):
        number = place if options.plant == "noise-by-local-row" else row
        base = options.seed * 10000 + step * 100
        clean = torch.randn(options.features, generator=torch.Generator().manual_seed(base + row))
        drawn = torch.Generator().manual_seed(base + 50 + number)
        noise = torch.randn(options.features, generator=drawn)
        time = torch.rand((), generator=drawn)
        rows.append(((1 - time).sqrt() * clean + time.sqrt() * noise, time, noise))
    noisy, times, noises = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return noisy, times, noises, many


def objective(options: argparse.Namespace, guess: Tensor, noise: Tensor, many: int) -> Tensor:
    """Return this rank's part of the mean squared error, times the ranks, over which DDP averages."""
    if options.plant == "last-batch-uneven":
        return F.mse_loss(guess, noise)
    elements = many * options.features
    if options.by_hand:
        return (guess - noise).square().sum() * WORLD / elements
    return F.mse_loss(guess, noise, reduction="sum") * WORLD / elements


def main() -> None:
    options = arguments(__doc__, "by-hand", features=7, width=20, rows=8)
    with ranks(options):
        inner = Denoiser(options)
        model = replicated(inner)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, amsgrad=True)
        for step in range(options.steps):
            noisy, times, noise, many = batch(options, step)
            objective(options, model(noisy, times), noise, many).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
