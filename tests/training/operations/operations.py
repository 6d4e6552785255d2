"""Trains one step of a small model whose modules are written operation by operation.

``--split hand`` divides heads and hidden units over the ranks by hand, ``--split dtensor`` by DTensor's
parallel styles, ``--split sequence`` the positions, unevenly. No import of ours. Mistakes are planted by
changing the text of a copy.
"""

from __future__ import annotations

import math

import pieces
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, HIDDEN, HEADS, FFN, BATCH, LENGTH = 31, 32, 4, 48, 3, 11
HEAD = HIDDEN // HEADS


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.split = False

    def forward(self, x, seen):
        x = pieces.enter(x, self.split)
        b, t, _ = x.shape
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q = q.view(b, t, -1, HEAD).transpose(1, 2)
        k = k.view(b, t, -1, HEAD).transpose(1, 2)
        v = v.view(b, t, -1, HEAD).transpose(1, 2)
        q = pieces.rms(q, 1.0)
        k = pieces.rms(k, 1.0)
        turns = pieces.angles(t, HEAD)
        q = pieces.rotate(q, turns)
        k = pieces.rotate(k, turns)
        scores = q @ k.transpose(-1, -2)
        scores = scores * HEAD**-0.5
        places = torch.arange(t)
        distance = places[:, None] - places[None, :]
        scores = scores - 0.1 * distance.abs()
        scores = scores.masked_fill(distance < 0, -math.inf)
        scores = scores.masked_fill(~seen[:, None, None, :], -1e9)
        top = scores.amax(-1, keepdim=True).detach()
        e = torch.exp(scores - top)
        p = e / e.sum(-1, keepdim=True)
        p = F.dropout(p, 0.0, self.training)
        y = torch.einsum("bhqk,bhkd->bhqd", p, v)
        y = y.transpose(1, 2).reshape(b, t, -1)
        y = self.o(y)
        y = pieces.leave(y, self.split)
        return y * seen[:, :, None]


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(1 + pieces.weight("norm", 1, HIDDEN)[0])
        self.bias = nn.Parameter(0.1 * pieces.weight("bias", 1, HIDDEN)[0])
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.split = self.cut = False

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        spread = x.var(-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(spread + 1e-3)
        normal = normal * self.norm + self.bias
        normal = pieces.enter(normal, self.split)
        up = self.up(normal)
        gate = self.gate(normal)
        curved = F.gelu(gate, approximate="tanh")
        mixed = curved * up
        mixed = pieces.Rounded.apply(mixed)
        mixed = mixed + 0.5 * F.silu(gate)
        limit = mixed.detach().abs().amax(-1, keepdim=True)
        limit = pieces.largest(limit, self.cut).clamp(min=1.0)
        mixed = mixed / limit
        mixed = mixed.clamp(-0.9, 0.9)
        y = self.down(mixed)
        y = pieces.leave(y, self.split)
        return x + 0.5 * y


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Parameter(pieces.weight("wi", 3 * HIDDEN, HIDDEN))
        self.wh = nn.Parameter(pieces.weight("wh", 3 * HIDDEN, HIDDEN))
        self.b = nn.Parameter(pieces.weight("b", 1, 3 * HIDDEN)[0] * 0.3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], HIDDEN)
        out = []
        for step in range(x.shape[1]):
            inner = F.linear(x[:, step], self.wi, self.b)
            hidden = F.linear(h, self.wh)
            ir, iz, ii = inner.chunk(3, -1)
            hr, hz, hi = hidden.chunk(3, -1)
            r = torch.sigmoid(ir + hr)
            z = torch.sigmoid(iz + hz)
            n = torch.tanh(ii + r * hi)
            h = (1 - z) * n + z * h
            out.append(h)
        return x + torch.stack(out, 1)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Parameter(pieces.weight("router", 4, HIDDEN))
        self.inner = nn.Parameter(torch.stack([pieces.weight(f"e{i}", HIDDEN, HIDDEN) for i in range(4)]))

    def forward(self, x):
        scores = F.linear(x, self.router)
        best, chosen = scores.topk(2, -1)
        share = torch.softmax(best, -1)
        total = torch.zeros_like(x)
        for e in range(4):
            taken = chosen == e
            part = (share * taken).sum(-1, keepdim=True)
            made = torch.tanh(x @ self.inner[e])
            total = total + part * made
        last = torch.cat((x[:, :1], x[:, :-1]), 1)
        level = torch.where(part > 0, total, last)
        level = level.roll(1, 1).flip(1).flip(1).roll(-1, 1)
        wide = level.float()
        wide = wide.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        total += 0.1 * wide.to(x.dtype)
        return total + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.attn = Attention()
        self.mlp = FeedForward()
        self.cell = Cell()
        self.moe = Experts()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            for name, module in self.named_modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    module.weight.copy_(pieces.weight(name, *module.weight.shape))

    def forward(self, ids, seen, sequence=False):
        x = self.embed(ids)
        x = x + self.attn(x, seen)
        x = self.cell(x)
        if sequence:
            x = pieces.Split.apply(x)
        x = self.mlp(x)
        if sequence:
            x = pieces.Gather.apply(x, ids.shape[1])
        x = self.moe(x)
        return self.head(x)


def split_by_hand(model):
    import torch.distributed as dist

    parts = dist.get_world_size()
    model.attn.split = model.mlp.split = model.mlp.cut = parts > 1
    cuts = {"q": 0, "k": 0, "v": 0, "o": 1, "up": 0, "gate": 0, "down": 1}
    for name, module in [*model.attn.named_children(), *model.mlp.named_children()]:
        piece = module.weight.detach().chunk(parts, cuts[name])[dist.get_rank()].clone()
        module.weight = nn.Parameter(piece)


def split_by_dtensor(model):
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {f"attn.{name}": ColwiseParallel() for name in "qkv"} | {"attn.o": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.gate": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model.mlp.cut = True


def train(split="", autocast=False):
    torch.manual_seed(0)
    model = Model()
    if split == "hand":
        split_by_hand(model)
    if split == "dtensor":
        split_by_dtensor(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    seen = torch.arange(LENGTH)[None, :] < torch.tensor([LENGTH, LENGTH - 2, LENGTH])[:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids[:, :-1], seen, sequence=split == "sequence")
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    if split == "sequence":
        import torch.distributed as dist

        for parameter in model.mlp.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return loss.item()
