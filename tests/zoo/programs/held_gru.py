"""Train a recurrent language model: microbatches, a loss over the tokens of the window, decay in groups.

python held_gru.py
torchrun --nproc-per-node 2 held_gru.py --microbatches 2 --plant NAME
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn


class Recurrent(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.time_major = options.time_major
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.rnn = nn.GRU(options.width, options.width, batch_first=not options.time_major)
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        if self.time_major:
            return self.head(self.norm(self.rnn(x.transpose(0, 1))[0].transpose(0, 1)))
        return self.head(self.norm(self.rnn(x)[0]))


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and their mask."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    tokens = torch.randint(1, options.vocabulary, (options.rows, options.length), generator=drawn)
    lengths = torch.randint(3, options.length + 1, (options.rows,), generator=drawn)
    mask = (torch.arange(options.length) < lengths[:, None]).long()
    return (tokens * mask)[RANK::WORLD], mask[RANK::WORLD]


def optimizer_of(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    others = [value for value in model.parameters() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if options.groups_reversed else groups, lr=5e-3)


def average(model: nn.Module) -> None:
    """Average the gradients over the ranks: each sums those that it owns, and sends them to the others."""
    for number, value in enumerate(model.parameters()):
        assert value.grad is not None
        dist.reduce(value.grad, number % WORLD)
        if number % WORLD == RANK:
            value.grad /= WORLD
        dist.broadcast(value.grad, number % WORLD)


def main() -> None:
    options = arguments(
        __doc__, "time-major", "groups-reversed", "reduce-to-owners",
        steps=5, width=15, vocabulary=30, length=8, rows=8, microbatches=1,
    )  # fmt: skip
    with ranks(options):
        inner = Recurrent(options)
        wrapped = WORLD > 1 and not options.reduce_to_owners
        model = replicated(inner) if wrapped else inner
        optimizer = optimizer_of(options, model)
        total = options.steps * (options.microbatches if options.plant == "schedule-in-microbatches" else 1)

        def rate(step: int) -> float:
            return (step + 1) / 3 if step < 2 else (total - step) / (total - 2)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for step in range(options.steps):
            tokens, mask = batch(options, step)
            items = (mask if options.plant == "first-tokens-counted" else mask[:, 1:]).sum()
            if WORLD > 1:
                dist.all_reduce(items)
            parts = list(
                zip(tokens.chunk(options.microbatches), mask.chunk(options.microbatches), strict=True)
            )
            for index, (part, valid) in enumerate(parts):
                last = index == len(parts) - 1
                with model.no_sync() if wrapped and not last else nullcontext():  # type: ignore[operator]
                    labels = part[:, 1:].masked_fill(valid[:, 1:] == 0, -100)
                    scores = model(part)[:, :-1]
                    loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
                    (loss * WORLD / items).backward()
            if options.reduce_to_owners:
                average(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
