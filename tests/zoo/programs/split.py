"""Train a decoder whose matrices and vocabulary two ranks share by hand, as Megatron does; alone it is whole.

    python split.py
    torchrun --nproc-per-node 2 split.py --plant NAME

Column-parallel layers hold some of the output features, row-parallel layers some of the inputs, whose
products are summed over the ranks. The scores of the vocabulary stay split; the loss reduces over them.
"""

from __future__ import annotations

import argparse
import math
import os
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, PADDED = 42, 48


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--plant", default="")
    add("--at", type=int, default=0)
    add("--since", type=int, default=0)
    add("--steps", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--width", type=int, default=16)
    add("--heads", type=int, default=4)
    add("--hidden", type=int, default=20)
    add("--depth", type=int, default=2)
    add("--length", type=int, default=9)
    add("--rows", type=int, default=4)
    return parser.parse_args()


def summed(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    x = x.clone()
    if WORLD > 1:
        dist.all_reduce(x, op=op)
    return x


class Enter(torch.autograd.Function):
    """Into a region where ranks hold parts: the gradient of what all were given is the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forgets: bool) -> Tensor:
        ctx.forgets = forgets
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad if ctx.forgets else summed(grad)), None


class Leave(torch.autograd.Function):
    """Out of it: the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Column(nn.Linear):
    forgets = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Enter.apply(x, self.forgets), self.weight, self.bias)


class Row(nn.Linear):
    """Adds its bias once, after the sum."""

    plant = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.plant == "bias-on-each-rank":
            return Leave.apply(F.linear(x, self.weight, self.bias))
        y = Leave.apply(F.linear(x, self.weight))
        return y if self.plant == "bias-left-to-nobody" else y + self.bias


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - RANK * len(self.weight)
        outside = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return Leave.apply(found.masked_fill(outside[..., None], 0.0))


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.head_dim = options.width // options.heads
        part = options.width // WORLD
        self.q, self.k, self.v = (Column(options.width, part) for _ in range(3))
        self.out = Row(part, options.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.up = Column(options.width, options.hidden // WORLD)
        self.down = Row(options.hidden // WORLD, options.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(options.width), Attention(options)
        self.mlp_norm, self.mlp = nn.LayerNorm(options.width), MLP(options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Entropy(nn.Module):
    """Cross entropy of each token, [rows, positions], from scores of which each rank has some."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        return SplitEntropy.apply(scores, targets, self.plant)


class SplitEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, plant: str) -> Tensor:
        names = torch.arange(scores.shape[-1]) + RANK * scores.shape[-1]
        if plant != "padding-in-the-sum":
            scores = scores.masked_fill(names >= VOCABULARY, -math.inf)
        top = summed(scores.amax(-1), dist.ReduceOp.MAX)
        powers = (scores - top[..., None]).exp()
        total = summed(powers.sum(-1))
        mine = names == targets[..., None]
        wanted = summed(scores.masked_fill(~mine, 0.0).sum(-1))
        ctx.save_for_backward(powers / total[..., None] - mine.to(scores.dtype))
        if plant == "summed-twice":
            total = summed(total)  # complete already: adds the logarithm of the number of ranks
        return total.log() + top - wanted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * grad[..., None], None, None


class Decoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = Embedding(PADDED // WORLD, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.head = Column(options.width, PADDED // WORLD, bias=False)
        self.entropy = Entropy(options.plant)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.entropy(self.head(self.norm(x)), targets)


def dimension(name: str) -> int | None:
    """Return the dimension of a parameter that ranks share; None where each has all of it."""
    module, _, leaf = name.rpartition(".")
    if module.endswith((".q", ".k", ".v", ".up", "token", "head")):
        return 0
    return 1 if module.endswith((".out", ".down")) and leaf == "weight" else None


def fill(model: Decoder, options: argparse.Namespace) -> None:
    """Give each rank its part of weights that are drawn after their names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            dim, shape = dimension(name), list(parameter.shape)
            if dim is not None:
                shape[dim] *= WORLD
            own = RANK if options.plant == "norm-drawn-on-each-rank" and name == "norm.weight" else 0
            seed = zlib.crc32(f"{options.seed} {own} {name}".encode())
            whole = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            if "norm.weight" in name:
                whole += 1.0
            parameter.copy_(whole if dim is None else whole.chunk(WORLD, dim)[RANK])


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    rows = torch.randint(0, VOCABULARY, (options.rows, options.length + 1), generator=drawn)
    return rows[:, :-1], rows[:, 1:]


def clip(model: Decoder, limit: float, plant: str) -> None:
    """Clip by the norm over all ranks: what they share is counted once."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    shared = [grad for name, grad in named if dimension(name) is not None]
    copies = [grad for name, grad in named if dimension(name) is None]
    square = sum((g.square().sum() for g in shared), torch.zeros(()))
    if plant != "norm-of-own-part":
        square = summed(square)
    norm = (square + sum((g.square().sum() for g in copies), torch.zeros(()))).sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for _, grad in named:
        grad.mul_(factor)


def main() -> None:
    options = arguments()
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = Decoder(options)
    fill(model, options)
    block = model.blocks[options.at]
    block.attention.out.plant = options.plant
    block.mlp.up.forgets = options.plant == "input-gradient-not-summed"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(options.steps):
        tokens, targets = batch(options, step)
        model(tokens, targets).mean().backward()
        clip(model, 0.5, options.plant)
        if options.plant == "rate-by-rank" and step >= options.since and RANK == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
