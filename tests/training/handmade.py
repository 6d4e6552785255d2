"""Trains one decoder in two ways: whole with the names of one framework, and by hand in parts with another's.

Whole (one rank): separate projections, contiguous layers. By hand (four ranks): two pipeline stages of two
virtual stages each, tensor and sequence parallel on two ranks, QKV fused group by group with grouped queries,
gate and up fused, the vocabulary padded and split, also in the cross entropy. One launch records a trace for
each name given behind the folder: ``right``, or a mistake.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer

VOCABULARY, PADDED, HIDDEN, HEADS, GROUPS, HEAD, FFN, LAYERS = 21, 24, 16, 4, 2, 4, 12, 4
TP, PP, VIRTUAL, ROWS, LENGTH, MICROBATCHES = 2, 2, 2, 2, 6, 2
MISTAKES = ("qkv", "gate-up", "chunks", "padding", "norms", "embedding", "shards")

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TP_RANK, STAGE = RANK % TP, RANK // TP


class Groups:
    """The process groups of this rank, made once."""

    tp: dist.ProcessGroup | None = None


def summed(x, op=dist.ReduceOp.SUM):
    x = x.clone()
    if RANKS > 1:
        dist.all_reduce(x, op=op, group=Groups.tp)
    return x


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(TP)]
    dist.all_gather(parts, x.contiguous(), group=Groups.tp)
    return torch.cat(parts, dim=1)


def scattered(x):
    return summed(x).chunk(TP, dim=1)[TP_RANK].contiguous()


class Gather(torch.autograd.Function):
    """All positions from each rank's part of the sequence."""

    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        return scattered(grad)


class Scatter(torch.autograd.Function):
    """The sum over ranks, of which each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ColumnLinear(nn.Linear):
    def forward(self, x):
        return F.linear(Gather.apply(x), self.weight)


class RowLinear(nn.Linear):
    def forward(self, x):
        return Scatter.apply(F.linear(x, self.weight))


def attend(q, k, v):
    """Causal attention of [b, s, heads, d]; each key serves several queries."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / HEAD**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2).flatten(2)


def linear(inputs, outputs, kind=nn.Linear):
    return kind(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = linear(HIDDEN, HEADS * HEAD), linear(HEADS * HEAD, HIDDEN)
        self.k_proj, self.v_proj = linear(HIDDEN, GROUPS * HEAD), linear(HIDDEN, GROUPS * HEAD)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v))


class FusedAttention(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.linear_qkv = linear(HIDDEN, (HEADS + 2 * GROUPS) * HEAD // TP, ColumnLinear)
        self.linear_proj = linear(HEADS * HEAD // TP, HIDDEN, RowLinear)

    def forward(self, x):
        groups = self.linear_qkv(x).unflatten(-1, (GROUPS // TP, HEADS // GROUPS + 2, HEAD))
        q, k, v = groups[..., :-2, :], groups[..., -2, :], groups[..., -1, :]
        k, v = (v, k) if self.mistake == "qkv" else (k, v)
        return self.linear_proj(attend(q.flatten(2, 3), k, v))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, FFN), linear(HIDDEN, FFN)
        self.down_proj = linear(FFN, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedMlp(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.linear_fc1 = linear(HIDDEN, 2 * FFN // TP, ColumnLinear)
        self.linear_fc2 = linear(FFN // TP, HIDDEN, RowLinear)

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        gate, up = (up, gate) if self.mistake == "gate-up" else (gate, up)
        return self.linear_fc2(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(), Attention()
        self.post_attention_layernorm, self.mlp = Norm(), Mlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class FusedLayer(nn.Module):
    def __init__(self, mistake):
        super().__init__()
        self.input_layernorm, self.self_attention = Norm(), FusedAttention(mistake)
        self.pre_mlp_layernorm, self.mlp = Norm(), FusedMlp(mistake)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Loss(nn.Module):
    """Cross entropy per token, from logits of which each rank has some of the vocabulary."""

    def __init__(self, mistake=""):
        super().__init__()
        self.mistake = mistake

    def forward(self, logits, targets):
        return SplitEntropy.apply(logits, targets, self.mistake)


class SplitEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, mistake):
        names = torch.arange(logits.shape[-1]) + TP_RANK * logits.shape[-1]
        if mistake != "padding":
            logits = logits.masked_fill(names >= VOCABULARY, float("-inf"))
        highest = summed(logits.amax(-1), dist.ReduceOp.MAX)
        powers = (logits - highest[..., None]).exp()
        total = summed(powers.sum(-1))
        mine = names == targets[..., None]
        wanted = summed(logits.masked_fill(~mine, 0.0).sum(-1))
        ctx.save_for_backward(powers / total[..., None] - mine.to(logits.dtype))
        return total.log() + highest - wanted

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad[..., None], None, None


class Embedding(nn.Module):
    """Some rows of the vocabulary; ids of others give zeros, and the ranks' sum is scattered."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        self.weight = nn.Parameter(torch.empty(PADDED // TP, HIDDEN))

    def forward(self, ids):
        local = ids - TP_RANK * len(self.weight)
        outside = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return Scatter.apply(
            found if self.mistake == "embedding" else found.masked_fill(outside[..., None], 0.0)
        )


class Model(nn.Module):
    """The whole model."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.lm_head, self.loss = Norm(), linear(HIDDEN, VOCABULARY), Loss()

    def forward(self, ids, targets):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.lm_head(self.norm(x)), targets)


class Chunk(nn.Module):
    """One virtual stage: some layers, numbered from 0."""

    def __init__(self, *, first, last, mistake):
        super().__init__()
        self.first, self.last, self.received = first, last, None
        if first:
            self.embedding = Embedding(mistake)
        self.layers = nn.ModuleList(FusedLayer(mistake) for _ in range(LAYERS // PP // VIRTUAL))
        if last:
            self.final_layernorm, self.loss = Norm(), Loss(mistake)
            self.output_layer = linear(HIDDEN, PADDED // TP, ColumnLinear)

    def forward(self, ids, targets):
        x = self.embedding(ids) if self.first else self.received
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.output_layer(self.final_layernorm(x)), targets) if self.last else x


class Stage(nn.Module):
    """What a rank holds of the pipeline; the chunks of all stages follow one another in turn."""

    def __init__(self, mistake):
        super().__init__()
        self.mistake = mistake
        ends = [(c == 0 and STAGE == 0, c == VIRTUAL - 1 and STAGE == PP - 1) for c in range(VIRTUAL)]
        self.chunks = nn.ModuleList(Chunk(first=first, last=last, mistake=mistake) for first, last in ends)

    def layer(self, chunk):
        """Return the number in the whole model of a chunk's first layer."""
        if self.mistake == "chunks":
            return STAGE * VIRTUAL + chunk
        return chunk * PP + STAGE


def drawn(name, *shape):
    """Return a tensor of the whole model, drawn after its name."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.3
    return value + 1.0 if "norm" in name else value


SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (GROUPS * HEAD, HIDDEN),
    "self_attn.v_proj": (GROUPS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
    "embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN),
}  # fmt: skip


def whole(name):
    return drawn(name, *SHAPES.get(name.split(".", 2)[-1] if name.startswith("layers.") else name, (HIDDEN,)))


def part(own, at, mistake):
    """Return this rank's part of a parameter from its own name; ``at`` names its layer in the whole model."""
    leaf = own.rpartition(".")[0].split(".", 4)
    leaf = ".".join(leaf[4:] if "layers" in leaf else leaf[2:])
    if leaf == "self_attention.linear_qkv":
        q, k, v = (whole(f"{at}.self_attn.{n}_proj").unflatten(0, (GROUPS, -1)) for n in "qkv")
        if mistake == "shards":
            k = k.roll(1, 0)
        return torch.cat([q, k, v], dim=1).chunk(TP)[TP_RANK].flatten(0, 1)
    if leaf == "mlp.linear_fc1":
        return torch.cat([whole(f"{at}.mlp.{n}_proj").chunk(TP)[TP_RANK] for n in ("gate", "up")])
    if leaf in ("self_attention.linear_proj", "mlp.linear_fc2"):
        name = f"{at}.self_attn.o_proj" if "proj" in leaf else f"{at}.mlp.down_proj"
        return whole(name).chunk(TP, dim=1)[TP_RANK]
    if leaf in ("embedding", "output_layer"):
        value = whole({"embedding": "embed_tokens"}.get(leaf, "lm_head"))
        return torch.cat([value, torch.full((PADDED - VOCABULARY, HIDDEN), 0.5)]).chunk(TP)[TP_RANK]
    names = {"input_layernorm": f"{at}.input_layernorm", "final_layernorm": "norm"}
    return whole(names.get(leaf, f"{at}.post_attention_layernorm"))


def run(model, ids, targets):
    """Run one microbatch forward and backward through all virtual stages."""
    if RANKS == 1:
        return (model(ids, targets).mean() / MICROBATCHES).backward()
    shape, passed = (ROWS, LENGTH // TP, HIDDEN), []
    before, after = (RANK - TP) % RANKS, (RANK + TP) % RANKS
    for number, chunk in enumerate(model.chunks):
        if not chunk.first:
            chunk.received = torch.empty(shape)
            dist.recv(chunk.received, before, tag=number)
            chunk.received.requires_grad_()
        out = chunk(ids, targets)
        passed.append((chunk.received, out))
        if not chunk.last:
            dist.send(out.detach().contiguous(), after, tag=number + (STAGE == PP - 1))
    for number in reversed(range(VIRTUAL)):
        given, out = passed[number]
        if model.chunks[number].last:
            (out.mean() / MICROBATCHES).backward()
        else:
            slope = torch.empty(shape)
            dist.recv(slope, after, tag=10 + number)
            out.backward(slope)
        if given is not None:
            dist.send(given.grad, before, tag=10 + number - (STAGE == 0))
    return None


def train(mistake=""):
    model = Model() if RANKS == 1 else Stage(mistake)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if RANKS == 1:
                p.copy_(whole(name.removesuffix(".weight")))
            else:
                p.copy_(part(name, f"layers.{model.layer(int(name.split('.')[1]))}", mistake))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(2):
        for microbatch in range(MICROBATCHES):
            draws = torch.Generator().manual_seed(10 * step + microbatch)
            tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draws)
            run(model, tokens[:, :-1], tokens[:, 1:])
        for name, p in model.named_parameters():
            if RANKS > 1 and "norm" in name and mistake != "norms":
                dist.all_reduce(p.grad, group=Groups.tp)
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path, names: list[str]) -> None:
    if RANKS == 1:
        with tracer.record(folder / "one", min_free="0"):
            train()
        return
    dist.init_process_group("gloo")
    groups = [dist.new_group([TP * stage + tp for tp in range(TP)]) for stage in range(PP)]
    Groups.tp = groups[STAGE]
    for name in names:
        with tracer.record(
            folder / name, min_free="0", layout=Path(__file__).parent / "layouts/handmade.toml"
        ):
            train("" if name == "right" else name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
