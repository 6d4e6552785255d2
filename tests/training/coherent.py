"""Train a small network under bfloat16 autocast, on one rank or several; ``--factor`` scales one gradient.

    torchrun --nproc-per-node 2 coherent.py --factor 1.005

With a factor, the gradient of one weight is that many times too large, as it comes out of backward.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, WIDTH, ROWS, LENGTH = 64, 64, 32, 16


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Linear(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        weight = Scaled.apply(self.weight, self.factor) if self.factor != 1.0 else self.weight
        return F.linear(x, weight, self.bias)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    if RANKS > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = Linear(WIDTH, WIDTH)
    hidden.factor = options.factor
    model: nn.Module = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), hidden, nn.GELU(), nn.Linear(WIDTH, VOCABULARY)
    )
    model = DistributedDataParallel(model) if RANKS > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    for _ in range(options.steps):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=data)[RANK::RANKS]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
