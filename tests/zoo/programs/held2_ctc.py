"""Train a recogniser of speech: convolutions that halve the time, attention, and CTC on labels without times.

    python held2_ctc.py
    torchrun --nproc-per-node 2 held2_ctc.py --plant NAME

The objective is the mean over the rows of all ranks.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Front(nn.Module):
    """Two convolutions over time and bands; the first halves the time, the second the bands."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.plant = options.plant
        self.first = nn.Conv2d(1, options.channels, 3, stride=(2, 1), padding=1)
        self.second = nn.Conv2d(options.channels, options.channels, 3, stride=(1, 2), padding=1)
        self.project = nn.Linear(options.channels * (options.bands // 2), options.width)

    def forward(self, sound: Tensor, valid: Tensor) -> Tensor:
        x = F.relu(self.first(sound[:, None]))
        if self.plant != "padding-convolved":
            x = x * valid[:, None, :, None]  # what the bias makes of padding must not reach the last frames
        x = F.relu(self.second(x))
        if self.plant == "bands-first":
            return self.project(x.permute(0, 2, 3, 1).flatten(2))
        return self.project(x.transpose(1, 2).flatten(2))


class Hide(nn.Module):
    """Hides two neighbouring frames of each row."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.from_numpy(np.random.randint(0, x.shape[1] - 1, len(x)))
        place = torch.arange(x.shape[1])
        return x.masked_fill(((place == first[:, None]) | (place == first[:, None] + 1))[..., None], 0.0)


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.hide = Hide() if options.hide else nn.Identity()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(self.hide(x))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.silu(self.up(self.norm2(x)))))


class Recogniser(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.recompute = options.recompute
        self.front = Front(options)
        self.drop = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(2))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.letters + 1)

    def forward(self, sound: Tensor, mask: Tensor) -> Tensor:
        valid = mask[:, ::2]
        x = self.drop(self.front(sound, valid))
        for block in self.blocks:
            x = checkpoint(block, x, valid, use_reentrant=False) if self.recompute else block(x, valid)
        return self.head(self.norm(x)).log_softmax(-1)


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's sounds, their masks, their letters and how many letters there are."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    sound = torch.randn(options.rows, options.frames, options.bands, generator=drawn)
    lengths = torch.randint(12, options.frames + 1, (options.rows,), generator=drawn)
    mask = torch.arange(options.frames) < lengths[:, None]
    letters = torch.randint(1, options.letters + 1, (options.rows, 3), generator=drawn)
    many = torch.randint(1, 4, (options.rows,), generator=drawn)
    every = (sound * mask[..., None], mask, letters, many)
    return tuple(part[RANK::WORLD] for part in every)  # type: ignore[return-value]


def objective(
    options: argparse.Namespace, logp: Tensor, mask: Tensor, letters: Tensor, many: Tensor
) -> Tensor:
    logp = logp.to(torch.get_default_dtype()).transpose(0, 1)
    if options.twice:
        logp = logp.log_softmax(-1)
    frames = mask[:, ::2].sum(1)
    return F.ctc_loss(logp, letters, frames, many, reduction="sum") * WORLD / options.rows


def main() -> None:
    options = arguments(
        __doc__, "twice", "hide", "recompute", "autocast",
        width=12, channels=4, bands=8, letters=7, frames=18, rows=8, dropout=0.0,
    )  # fmt: skip
    with ranks(options):
        model = replicated(Recogniser(options))
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        torch.manual_seed(options.seed * 10 + RANK)  # each rank drops elements of its own
        np.random.seed(options.seed)
        half = options.autocast and not options.double
        for step in range(options.steps):
            sound, mask, letters, many = batch(options, step)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logp = model(sound.to(torch.get_default_dtype()), mask)
            objective(options, logp, mask, letters, many).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
            if RANK == 0:
                row = step % len(logp)
                if options.plant == "sample-drawn" and step + 1 == options.since:
                    row = int(torch.randint(len(logp), ()))
                print(f"step {step}, row {row}: {logp[row].argmax(-1).tolist()}")


if __name__ == "__main__":
    main()
