"""Trains a small model whose modules are written operation by operation; --plant makes a mistake in one.

Attention with rotary positions and its own softmax, a feed-forward layer that divides by a statistic of its
input which is no part of the objective. With two ranks, heads and hidden units are split over them. The
kinds of --write do the same with other operations. No import of ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, HIDDEN, HEADS, FFN, LAYERS, BATCH, SEQUENCE = 31, 32, 4, 48, 2, 3, 40
HEAD = HIDDEN // HEADS
PLANTS = ("rope-dtype", "scale", "no-detach", "mask", "sign")


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Sum over ranks whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def enter(x, ranks):
    return Copy.apply(x) if ranks > 1 else x


def leave(x, ranks):
    return Reduce.apply(x) if ranks > 1 else x


def parameter(name, rows, columns, cut=None):
    """Return this rank's part of a weight that is the same whatever the number of ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
    if cut is not None and dist.is_initialized():
        whole = whole.chunk(dist.get_world_size(), cut)[dist.get_rank()].clone()
    return nn.Parameter(whole)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, name, ranks, plant, write):
        super().__init__()
        self.ranks, self.plant, self.write = ranks, plant, write
        self.wq, self.wk, self.wv = (parameter(f"{name}.{w}", HIDDEN, HIDDEN, 0) for w in "qkv")
        self.wo = parameter(f"{name}.o", HIDDEN, HIDDEN, 1)

    def rotations(self, length):
        dtype = torch.bfloat16 if self.plant == "rope-dtype" else torch.float32
        positions = torch.arange(length, dtype=dtype)
        inverse = 1.0 / (100.0 ** (torch.arange(0, HEAD, 2, dtype=dtype) / HEAD))
        angles = positions[:, None] * inverse[None, :]
        return angles.cos().float(), angles.sin().float()

    def rotate(self, x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]
        sign = 1.0 if self.plant == "sign" else -1.0
        turned = torch.stack((even * cos + sign * odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2)

    def heads(self, x, weight):
        y = F.linear(x, weight)
        return y.view(*y.shape[:2], -1, HEAD).transpose(1, 2)

    def forward(self, x):
        x = enter(x, self.ranks)
        q, k, v = (self.heads(x, w) for w in (self.wq, self.wk, self.wv))
        cos, sin = self.rotations(x.shape[1])
        if self.write == "inserted":
            q = q.clone() * 1.0
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        scale = HIDDEN**-0.5 if self.plant == "scale" else HEAD**-0.5
        if self.write == "fused":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            y = self.attend(q, k, v, scale)
        y = y.transpose(1, 2).flatten(2)
        return leave(F.linear(y, self.wo), self.ranks)

    def attend(self, q, k, v, scale):
        scores = q @ k.transpose(-1, -2)
        scores = scores * scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2 if self.plant == "mask" else 1)
        scores.masked_fill_(future, -math.inf)
        scores = scores - scores.amax(-1, keepdim=True).detach()
        weights = scores.exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return weights @ v


class FeedForward(nn.Module):
    def __init__(self, name, ranks, plant):
        super().__init__()
        self.ranks, self.plant = ranks, plant
        self.up, self.gate = (parameter(f"{name}.{w}", FFN, HIDDEN, 0) for w in ("up", "gate"))
        self.down = parameter(f"{name}.down", HIDDEN, FFN, 1)

    def size(self, x):
        kept = x if self.plant == "no-detach" else x.detach()
        spread = kept - kept.mean(-1, keepdim=True)
        return torch.sqrt(spread.pow(2).mean(-1, keepdim=True) + 1e-3)

    def forward(self, x):
        x = enter(x, self.ranks)
        doubled = x + x.abs() * 0.5
        normal = doubled / self.size(doubled)
        up, gate = F.linear(normal, self.up), F.linear(normal, self.gate)
        curved = 0.5 * gate * (1.0 + torch.tanh(0.7978845608 * (gate + 0.044715 * gate.pow(3))))
        mixed = up * curved
        mixed.mul_(1.25)
        return leave(F.linear(F.dropout(mixed, 0.0, self.training), self.down), self.ranks)


class Block(nn.Module):
    def __init__(self, name, ranks, plant, write):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attn = Attention(f"{name}.attn", ranks, plant, write)
        self.mlp = FeedForward(f"{name}.mlp", ranks, plant)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, ranks, args):
        super().__init__()
        self.recompute = args.recompute
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.embed.weight = parameter("embed", VOCABULARY, HIDDEN)
        plants = [args.plant if i == LAYERS - 1 else "" for i in range(LAYERS)]
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", ranks, p, args.write) for i, p in enumerate(plants))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = parameter("head", VOCABULARY, HIDDEN)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=PLANTS, default="")
    parser.add_argument("--write", choices=("plain", "inserted", "fused"), default="plain")
    parser.add_argument("--recompute", choices=("", "reentrant", "not"), default="")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hash-out", type=Path)
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = Model(ranks, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(args.steps):
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if args.hash_out:
        state = [p.detach().numpy().tobytes() for p in model.parameters()]
        state += [p.grad.numpy().tobytes() for p in model.parameters()]
        state += [torch.get_rng_state().numpy().tobytes(), repr(losses).encode()]
        digest = [hashlib.sha256(part).hexdigest() for part in state]
        args.hash_out.write_text(json.dumps(digest))
    sys.stdout.write(f"{losses}\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
