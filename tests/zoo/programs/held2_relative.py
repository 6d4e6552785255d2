"""Train an encoder-decoder with relative position biases and tied embeddings, as trainers of such models do.

    python held2_relative.py
    torchrun --nproc-per-node 2 held2_relative.py --microbatches 2 --plant NAME

Losses of all microbatches and ranks of a step are divided by the number of all their labels; the learning
rate warms up and decays; gradients are clipped; the state is written and read back where that is asked for.
"""

from __future__ import annotations

import argparse
import io
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PAD, BUCKETS, IGNORED = 0, 8, -100


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class RelativeBias(nn.Module):
    """A bias for each head and each distance, of which far ones share some: [1, heads, queries, keys]."""

    def __init__(self, options: argparse.Namespace, both_ways: bool) -> None:
        super().__init__()
        self.both_ways, self.one_hot = both_ways, options.one_hot
        self.table = nn.Parameter(0.5 * torch.randn(BUCKETS, options.heads))

    def forward(self, length: int) -> Tensor:
        place = torch.arange(length)
        distance = place[None, :] - place[:, None]  # of the key from the query
        if self.both_ways:
            half = BUCKETS // 2
            bucket = (distance > 0).long() * half + distance.abs().clamp(max=half - 1)
        else:
            bucket = (-distance).clamp(0, BUCKETS - 1)
        if self.one_hot:
            bias = F.one_hot(bucket, BUCKETS).to(self.table.dtype) @ self.table
        else:
            bias = F.embedding(bucket, self.table)
        return bias.permute(2, 0, 1)[None]


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        inner = options.heads * options.part
        self.heads, self.fused = options.heads, options.fused
        self.q, self.k, self.v = (nn.Linear(options.width, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, options.width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        """Attend to memory; ``bias`` is added to scores, which this kind of model does not scale."""
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.k, self.v))
        if self.fused:
            bias = bias.expand(len(x), self.heads, q.shape[2], k.shape[2])
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        else:
            mixed = (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, options: argparse.Namespace, crosses: bool) -> None:
        super().__init__()
        self.own_norm, self.own = Norm(options.width), Attention(options)
        if crosses:
            self.cross_norm, self.cross = Norm(options.width), Attention(options)
        self.norm = Norm(options.width)
        self.wi = nn.Linear(options.width, options.hidden, bias=False)
        self.wo = nn.Linear(options.hidden, options.width, bias=False)

    def forward(
        self, x: Tensor, bias: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        y = self.own_norm(x)
        x = x + self.own(y, y, bias)
        if memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, seen)
        return x + self.wo(F.gelu(self.wi(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, options: argparse.Namespace, decodes: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(options, both_ways=not decodes)
        self.layers = nn.ModuleList(Layer(options, decodes) for _ in range(2))
        self.norm = Norm(options.width)

    def forward(
        self, x: Tensor, hidden: Tensor, memory: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """``hidden`` is what may not be attended to, and ``seen`` the bias that hides padding of memory."""
        bias = self.bias(x.shape[1]).masked_fill(hidden, -math.inf)
        for layer in self.layers:
            x = layer(x, bias, memory, seen)
        return self.norm(x)


class Translator(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.plant = options.plant
        self.shared = nn.Embedding(options.vocabulary, options.width)
        self.encoder, self.decoder = Stack(options, decodes=False), Stack(options, decodes=True)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        padding = (mask == 0)[:, None, None, :]
        memory = self.encoder(self.shared(tokens), padding)
        known = labels.masked_fill(labels == IGNORED, PAD)
        if self.plant != "not-shifted":
            known = F.pad(known[:, :-1], (1, 0), value=PAD)  # which is what a decoder begins with, too
        future = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool).triu(1)
        unseen = torch.zeros(padding.shape, dtype=memory.dtype).masked_fill(padding, -math.inf)
        x = self.decoder(self.shared(known), future, memory, unseen)
        return self.head(x * x.shape[-1] ** -0.5)


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens, their mask, and labels, padded to a common length."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)

    def rows(length: int, least: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(1, options.vocabulary, (options.rows, length), generator=drawn)
        many = torch.randint(least, length, (options.rows,), generator=drawn)
        return tokens, torch.arange(length) < many[:, None]

    tokens, valid = rows(options.length, 4)
    labels, counted = rows(options.length - 1, 3)
    labels = labels.masked_fill(~counted, IGNORED)
    return (tokens * valid)[RANK::WORLD], valid.long()[RANK::WORLD], labels[RANK::WORLD]


def items_of_all(options: argparse.Namespace, mask: Tensor, labels: Tensor) -> Tensor:
    """Return how many labels the step has, on all ranks and in all microbatches."""
    items = mask.sum() if options.plant == "items-of-the-source" else (labels != IGNORED).sum()
    if WORLD > 1:
        dist.all_reduce(items)
    return items


def built(options: argparse.Namespace) -> nn.Module:
    """Return the model with pretrained weights, which hold the tied one under both names."""
    inner = Translator(options)
    pretrained = {name: value.clone() for name, value in inner.state_dict().items()}
    inner.load_state_dict(pretrained, assign=True)
    if options.plant != "untied":
        inner.tie()
    if not options.shard:
        return replicated(inner)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    for layer in [*inner.encoder.layers, *inner.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(inner, mesh=mesh)


def written(*parts: nn.Module | torch.optim.Optimizer) -> io.BytesIO:
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return file


def read_back(file: io.BytesIO, *parts: nn.Module | torch.optim.Optimizer) -> None:
    for part, state in zip(parts, torch.load(file), strict=True):
        part.load_state_dict(state)


def main() -> None:
    options = arguments(
        __doc__, "one-hot", "fused", "shard", "read-back",
        steps=4, width=14, heads=2, part=5, hidden=25, vocabulary=31, length=9, rows=8, microbatches=1,
    )  # fmt: skip
    with ranks(options):
        model = built(options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
        warm = 2

        def rate(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            return max(0.0, (options.steps + 1 - step) / (options.steps + 2 - warm))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for step in range(options.steps):
            tokens, mask, labels = batch(options, step)
            items = items_of_all(options, mask, labels)
            for part in range(options.microbatches):
                given = [x.chunk(options.microbatches)[part] for x in (tokens, mask, labels)]
                scores = model(*given)
                loss = F.cross_entropy(
                    scores.flatten(0, 1), given[2].flatten(), ignore_index=IGNORED, reduction="sum"
                )
                (loss * WORLD / items).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.5)
            optimizer.step()
            early = written(model, optimizer) if options.read_back else None
            for _ in range(WORLD if options.plant == "scheduled-by-each-rank" else 1):
                scheduler.step()
            optimizer.zero_grad()
            if early is not None and step + 1 == options.since:
                before = options.plant == "written-before-the-schedule"
                read_back(early if before else written(model, optimizer), model, optimizer)


if __name__ == "__main__":
    main()
