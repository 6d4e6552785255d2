"""Train a decoder block split over tensor-parallel ranks by hand, in the manner of Megatron.

Columns of the first matrix and rows of the second lie on different ranks; two autograd functions stand for
the communication: f (identity forward, sum backward) and g (sum forward, identity backward). A bias after g
is added once. Embedding, norms and head are whole on every rank. On one rank nothing is split.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=36)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=41)
    parser.add_argument("--length", type=int, default=10)
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--rate", type=float, default=2e-3)
    return parser.parse_args()


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Copied(torch.autograd.Function):
    """f: what every rank holds alike goes to columns of different ranks; its gradient is their sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        if dist.is_initialized():
            dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """g: rows of different ranks give parts of one sum."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Column(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(made // world(), given))
        self.bias = nn.Parameter(torch.empty(made // world()))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copied.apply(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(made, given // world()))
        self.bias = nn.Parameter(torch.empty(made))

    def forward(self, x: Tensor) -> Tensor:
        return Summed.apply(F.linear(x, self.weight)) + self.bias


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.dim = options.head_dim
        width = options.heads * options.head_dim
        self.q, self.k, self.v = (Column(width, width) for _ in range(3))
        self.proj = Row(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Column(width, hidden), Row(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.head_dim
        self.norm1, self.attention = nn.LayerNorm(width), Attention(options)
        self.norm2, self.mlp = nn.LayerNorm(width), MLP(width, options.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.head_dim
        self.embed = nn.Embedding(options.vocabulary, width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, options.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fill(model: Model, seed: int) -> None:
    """Draw whole tensors alike on every rank and keep this rank's part."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for owner in model.modules():
            for name, held in owner.named_parameters(recurse=False):
                dim = {"Column": 0, "Row": 1}.get(type(owner).__name__)
                dim = None if type(owner).__name__ == "Row" and name == "bias" else dim
                shape = list(held.shape)
                if dim is not None:
                    shape[dim] *= world()
                whole = torch.randn(shape, generator=generator, dtype=torch.float64)
                whole = whole * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
                whole += isinstance(owner, nn.LayerNorm) and name == "weight"
                held.copy_(whole if dim is None else whole.chunk(world(), dim)[rank()])


def main() -> None:
    options = arguments()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    model = Model(options)
    model.to(getattr(torch, options.dtype))
    fill(model, options.seed)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate)
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in range(options.steps):
        shape = (options.rows, options.length + 1)
        rows = torch.randint(0, options.vocabulary, shape, generator=generator)
        for chunk in rows.chunk(options.microbatches):
            scores = model(chunk[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
            (loss / (options.rows * options.length)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
