"""A small decoder whose parts are modules of their own; some mistakes are planted in block ``at``."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PAD = 0


class Rotary(nn.Module):
    """Returns cosines and sines of the angles, both [positions, head_dim / 2]."""

    def __init__(self, head_dim: int, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.register_buffer("rates", 10000.0 ** -torch.linspace(0, 1, head_dim // 2), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.rates
        cos, sin = angles.cos(), angles.sin()
        if self.plant == "rotary-in-bf16":
            cos, sin = cos.bfloat16().float(), sin.bfloat16().float()
        if self.plant == "rotary-in-fp16":
            cos, sin = cos.half().float(), sin.half().float()
        return cos, sin


class Attention(nn.Module):
    """``qkv`` holds the rows of all queries, then those of all keys, then those of all values."""

    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.heads, self.plant = options.heads, plant
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.out = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = turned(query, cos, sin), turned(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.plant == "heads-not-moved":
            return self.out(mixed.reshape(x.shape))
        return self.out(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


class MLP(nn.Module):
    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.gate = nn.Linear(options.width, options.hidden)
        self.up = nn.Linear(options.width, options.hidden)
        self.down = nn.Linear(options.hidden, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.plant == "draws-before-dropout" and self.training:
            torch.rand(1)  # a metric that samples a token
        y = self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))
        if self.plant == "one-element":
            y = y.clone()
            y[0, 0, y[0, 0].abs().argmax()] *= 1.0001
        return y


class DropPath(nn.Module):
    """Leaves out a branch for some rows."""

    def __init__(self, rate: float, plant: str) -> None:
        super().__init__()
        self.rate, self.plant = rate, plant

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = torch.rand(x.shape[0], 1, 1)
        kept = drawn < self.rate if self.plant == "path-mask-inverted" else drawn >= self.rate
        return x * kept / (1 - self.rate)


class Shift(nn.Module):
    """Gives each position what the one before it holds."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.by = 2 if plant == "shifted-twice" else 1

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, self.by, 0))[:, : x.shape[1]]


class Sizes(nn.Module):
    """Embeds the number of tokens of each row, [rows, 1, width]."""

    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.table = nn.Embedding(options.length + 1, options.width)
        self.kept: Tensor | None = None

    def forward(self, sizes: Tensor) -> Tensor:
        if self.plant == "cache-not-cleared":
            if self.kept is not None:
                return self.kept * 1.0
            self.kept = self.table(sizes)[:, None].detach()
        return self.table(sizes)[:, None]


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.attention_norm = nn.LayerNorm(options.width)
        self.attention = Attention(options, plant)
        self.mlp_norm = nn.LayerNorm(options.width)
        self.mlp = MLP(options, plant)
        self.drop_path = DropPath(0.0, plant)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = x if self.plant == "norm-not-called" else self.mlp_norm(x)
        return x + self.drop_path(self.mlp(y))


class Decoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        plant = options.plant
        self.keep_generator = plant != "recomputed-anew"
        self.checkpoint = options.checkpoint
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.sizes = Sizes(options, plant)
        self.shift = Shift(plant)
        self.rotary = Rotary(options.width // options.heads, plant)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(
            Block(options, plant if n == options.at else "") for n in range(options.depth)
        )
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.sizes((tokens != PAD).sum(1))
        x = self.dropout(x + 0.5 * self.shift(x))
        cos, sin = self.rotary(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.checkpoint:
                keep = self.keep_generator
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=keep)
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))


def build(options: argparse.Namespace, rank: int) -> Decoder:
    """Return the model with weights that are the same on every rank, no bias and no scale constant."""
    torch.manual_seed(options.seed + (rank if options.plant == "own-weights" else 0))
    model = Decoder(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        convert(model, options)
    return model


def convert(model: Decoder, options: argparse.Namespace) -> None:
    """Load a block's fused weight from another program's checkpoint, in the wrong order where planted."""
    weight = model.blocks[options.at].attention.qkv.weight
    parts = weight.detach().clone().unflatten(0, (3, options.heads, -1))  # [q k v, head, head_dim, width]
    if options.plant == "qkv-by-head":
        weight.copy_(parts.transpose(0, 1).flatten(0, 2))
    if options.plant == "query-key-swapped":
        weight.copy_(parts[[1, 0, 2]].flatten(0, 2))
    if options.plant == "saved-in-bf16":
        weight.copy_(weight.bfloat16().float())
