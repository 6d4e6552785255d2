"""A small decoder with grouped queries, a gated MLP or experts, and sizes that no mesh divides."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50
PAD = 0
WIDTH = 16
HEADS = 4
HIDDEN = 13
EXPERTS = 4
CHOICES = 2
LENGTH = 16

Mix = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of queries on keys and values, all [rows, positions, heads, head_dim], given the positions."""


@dataclass(frozen=True)
class Shape:
    """What differs between the models of the tests."""

    depth: int = 2
    kv_heads: int = 2
    tied: bool = False
    experts: bool = False
    batch_norm: bool = False
    vocabulary: int = VOCABULARY
    dropout: float = 0.0
    attention_dropout: bool = True
    width: int = WIDTH
    heads: int = HEADS
    hidden: int = HIDDEN

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def causal_mix(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, dropout: float = 0.0) -> Tensor:
    return masked_mix(query, key, value, positions, positions, dropout)


def masked_mix(
    query: Tensor, key: Tensor, value: Tensor, at: Tensor, of: Tensor, dropout: float = 0.0
) -> Tensor:
    """Let the query at each position ``at`` see the keys at positions ``of`` that are not after it."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(of[None, :] > at[:, None], -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(scores.softmax(-1), dropout), value)


class Attention(nn.Module):
    """``kv`` holds, for each of its heads, the rows of the key and then those of the value."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dropout = shape.dropout if shape.attention_dropout else 0.0
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.q = nn.Linear(shape.width, shape.heads * shape.head_dim)
        self.kv = nn.Linear(shape.width, shape.kv_heads * 2 * shape.head_dim)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.width)
        self.queries_per_head = shape.heads // shape.kv_heads
        self.swapped = False  # takes the value's rows for the key's
        self.first_query = 0  # of the heads that this rank computes, where its keys are all heads'
        self.mix: Mix = functools.partial(causal_mix, dropout=dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        query = self.q(x).unflatten(-1, (-1, self.head_dim))
        key, value = self.kv(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        if self.swapped:
            key, value = value, key
        mine = torch.arange(query.shape[2]) + self.first_query
        head_of = mine // self.queries_per_head
        return self.out(self.mix(query, key[:, :, head_of], value[:, :, head_of], positions).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.gate = nn.Linear(shape.width, shape.hidden)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.exchanged = False

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.exchanged:
            gate, up = up, gate
        return self.down(F.dropout(F.silu(gate) * up, self.dropout))


class Experts(nn.Module):
    """Sends each token to the two experts that the router likes best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): MLP(shape) for e in range(EXPERTS)})
        self.exchange: Callable[[Tensor, Tensor], Tensor] = self.compute

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).topk(CHOICES, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = choice.flatten().argsort(stable=True)
        counts = choice.flatten().bincount(minlength=EXPERTS)
        answers = self.exchange(tokens[order // CHOICES], counts) * weight.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // CHOICES, answers).view_as(x)

    def compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' answers; tokens lie by expert, ``counts`` of each."""
        parts = tokens.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts, strict=True)])


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp = Experts(shape) if shape.experts else MLP(shape, shape.dropout)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class RowNorm(nn.Module):
    """Adds to each row its mean over tokens, batch-normalised over the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        count = valid.sum(1, keepdim=True)
        return x + self.norm((x * valid[..., None]).sum(1) / count)[:, None]


def called(module: nn.Module, *given: Tensor) -> Tensor:
    return module(*given)


class Decoder(nn.Module):
    """The whole model, or what a pipeline stage keeps of it: parts that were set to None are passed over."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token: nn.Embedding | None = nn.Embedding(shape.vocabulary, shape.width)
        self.position: nn.Embedding | None = nn.Embedding(LENGTH, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.batch_norm = RowNorm(shape.width) if shape.batch_norm else None
        self.layers = nn.ModuleDict({str(n): Block(shape) for n in range(shape.depth)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(shape.width)
        self.head: nn.Linear | None = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight
        self.positions: Callable[[int], Tensor] = torch.arange
        self.run: Callable[..., Tensor] = called

    def forward(self, x: Tensor) -> Tensor:
        tokens, positions = x, self.positions(x.shape[1])
        if self.token is not None:
            assert self.position is not None
            x = self.dropout(self.token(x) + self.position(positions[None, :]))
        if self.batch_norm is not None:
            x = self.batch_norm(x, tokens != PAD)
        for layer in self.layers.values():
            x = self.run(layer, x, positions)
        if self.head is not None:
            assert self.norm is not None
            x = self.head(self.norm(x))
        return x


def build(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """Return the model with the weights that every layout starts from; no bias and no scale is constant."""
    torch.manual_seed(seed)
    model = Decoder(shape).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)
