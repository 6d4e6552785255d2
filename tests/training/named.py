"""Attention by hand on tensor parallel ranks, whose scores no module call shows: the program names them.

On one rank it is the same model whole. It records itself once per way of saying how the scores lie.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tensortrace import tracer

HIDDEN, HEADS, LENGTH, ROWS = 8, 4, 6, 2

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

AXES = "format = 1\naxes = { tp = 2 }\n"

RULES = """
[[rule]]
name = ["q.weight", "k.weight", "v.weight"]
dims = "o[tp] i"
[[rule]]
name = ["q", "k", "v"]
slot = "out*"
dims = "b s h[tp]"
[[rule]]
name = "proj.weight"
dims = "o i[tp]"
[[rule]]
name = "proj"
slot = "in*"
dims = "b s h[tp]"
[[rule]]
name = "proj"
slot = "out*"
dims = "b s h partial:tp"
grad = "b s h same:tp"
[[rule]]
name = ["q", "k", "v"]
slot = "in*"
dims = "b s h same:tp"
grad = "b s h partial:tp"
[[rule]]
name = "*"
dims = "... same:tp"
"""


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Attention(nn.Module):
    def __init__(self, stated):
        super().__init__()
        self.stated = stated
        heads = HEADS // RANKS * (HIDDEN // HEADS)
        self.embed = nn.Embedding(11, HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, heads, bias=False) for _ in range(3))
        self.proj = nn.Linear(heads, HIDDEN, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = Spread.apply(x) if RANKS > 1 else x
        q, k, v = (m(x).unflatten(-1, (HEADS // RANKS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = tracer.boundary("scores", q @ k.transpose(-1, -2), **self.stated)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        out = self.proj(mixed)
        out = Sum.apply(out) if RANKS > 1 else out
        return out


def whole(name):
    full = (11 if "embed" in name else HIDDEN, HIDDEN)
    return torch.randn(full, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.5


def train(stated):
    model = Attention(stated)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = whole(name)
            if "embed" not in name:
                value = value.chunk(RANKS, dim=1 if name.startswith("proj") else 0)[RANK]
            p.copy_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = torch.randint(11, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    if RANKS == 1:
        with tracer.record(folder / "one", min_free="0"):
            train({})
        return
    dist.init_process_group("gloo")
    mesh = tracer.Mesh(axes=("tp",), shape=(2,), ranks=(0, 1))
    file = folder / f"named{RANK}.toml"
    file.write_text(AXES + RULES)
    right = {"layout": "b heads[tp] s t"}
    with tracer.record(folder / "mesh", min_free="0"):
        train(right | {"mesh": mesh})
    with tracer.record(folder / "file", min_free="0", layout=file):
        train(right)
    with tracer.record(folder / "vain", min_free="0"):
        train(right)
    for name, text in (("garbled", "b heads[tp"), ("unfit", "b s[tp]"), ("grad", "b heads[tp] s t")):
        with tracer.record(folder / name, min_free="0", layout=file):
            train({"layout": text, "grad": "b heads s t same:tp" if name == "grad" else None})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
