"""Train a decoder with RMSNorm, rotary positions, grouped queries and SwiGLU under several ways to spread it.

    python llama.py
    torchrun --nproc-per-node 4 llama.py --spread fsdp2-tp

The objective is the mean over all tokens of the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SPREADS = ["ddp", "fsdp2", "fsdp2-kept", "fsdp1", "hsdp", "tp", "fsdp2-tp", "zero1"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=30)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=53)
    parser.add_argument("--length", type=int, default=9)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--spread", choices=SPREADS, default="ddp")
    parser.add_argument("--kernel", choices=["explicit", "sdpa"], default="sdpa")
    parser.add_argument("--grouped", choices=["repeat", "native", "einsum"], default="repeat")
    parser.add_argument("--rotary", choices=["halves", "complex"], default="halves")
    parser.add_argument("--norm", choices=["hand", "torch"], default="hand")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--precision", choices=["fp32", "amp", "mixed", "bf16", "fp64"], default="fp32")
    parser.add_argument("--muon", action="store_true", help="Muon for matrices, AdamW for the rest")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--max-norm", type=float, default=1.0)
    return parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


def angles(length: int, dim: int, dtype: torch.dtype) -> Tensor:
    rates = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return (torch.arange(length, dtype=torch.float64)[:, None] * rates).to(dtype)


def rotated(x: Tensor, how: str) -> Tensor:
    """Turn pairs of features (n, n + dim/2) of [rows, heads, positions, dim] by their position's angles."""
    wide = x if x.dtype == torch.float64 else x.float()
    angle = angles(x.shape[-2], x.shape[-1], wide.dtype)
    one, two = wide.chunk(2, -1)
    if how == "complex":
        turned = torch.complex(one.contiguous(), two.contiguous()) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.head_dim
        self.options = options
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, options.kv_heads * options.head_dim, bias=False)
        self.wv = nn.Linear(width, options.kv_heads * options.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        dim, how = self.options.head_dim, self.options
        q, k, v = (f(x).unflatten(-1, (-1, dim)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        q, k = rotated(q, how.rotary), rotated(k, how.rotary)
        groups = how.heads // how.kv_heads
        if how.grouped == "einsum":
            grouped = q.unflatten(1, (-1, groups))
            scores = torch.einsum("bkgqd,bksd->bkgqs", grouped, k) * dim**-0.5
            scores = scores.masked_fill(self._future(x.shape[1]), float("-inf"))
            mixed = torch.einsum("bkgqs,bksd->bkgqd", scores.softmax(-1), v).flatten(1, 2)
        elif how.kernel == "sdpa" and how.grouped == "native":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
            if how.kernel == "sdpa":
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = (q @ k.transpose(-1, -2)) * dim**-0.5
                mixed = scores.masked_fill(self._future(x.shape[1]), float("-inf")).softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _future(length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.head_dim
        norm = RMSNorm if options.norm == "hand" else lambda width: nn.RMSNorm(width, eps=1e-5)
        self.attention_norm, self.attention = norm(width), Attention(options)
        self.ffn_norm, self.feed_forward = norm(width), FeedForward(width, options.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.heads * options.head_dim
        self.tok_embeddings = nn.Embedding(options.vocabulary, width)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.depth))
        self.norm = RMSNorm(width) if options.norm == "hand" else nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, options.vocabulary, bias=False)
        self.recomputed = options.checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)
        return self.output(self.norm(x))


def build(options: argparse.Namespace) -> Transformer:
    torch.manual_seed(options.seed)
    model = Transformer(options).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.1 if "norm" in name else 0.02) * torch.randn_like(parameter))
    return model.to({"fp64": torch.float64, "bf16": torch.bfloat16}.get(options.precision, torch.float32))


def tensor_parallel(model: Transformer, mesh: object) -> None:
    for layer in model.layers:
        plan = {
            "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(), "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }  # fmt: skip
        parallelize_module(layer, mesh, plan)


def spread(model: Transformer, options: argparse.Namespace, world: int) -> tuple[nn.Module, int]:
    """Return what is trained, and over how many parts the rows are dealt out."""
    how = options.spread
    policy = MixedPrecisionPolicy()
    if options.precision == "mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if how in ("ddp", "zero1"):
        return DistributedDataParallel(model), world
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True), world
    if how == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
        return model, 1
    if how == "fsdp2-tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        mesh = mesh["dp"]
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=how != "fsdp2-kept")
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, world // 2 if how == "fsdp2-tp" else world


def optimizers(model: nn.Module, options: argparse.Namespace, world: int) -> list[torch.optim.Optimizer]:
    settings = {"lr": options.rate, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if options.muon:
        inner = [p for n, p in model.named_parameters() if "layers" in n and p.dim() == 2]
        known = set(map(id, inner))
        others = [p for p in model.parameters() if id(p) not in known]
        return [torch.optim.Muon(inner, lr=0.01, weight_decay=0.05), torch.optim.AdamW(others, **settings)]
    if options.spread == "zero1" and world > 1:
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)]
    return [torch.optim.AdamW(model.parameters(), **settings)]


def batch(options: argparse.Namespace, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * options.seed + step)
    shape = (options.rows, options.length + 1)
    return torch.randint(0, options.vocabulary, shape, generator=generator)


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    model: nn.Module = build(options)
    parts = 1
    if world > 1:
        dist.init_process_group("gloo")
        model, parts = spread(model, options, world)  # type: ignore[arg-type]
    updaters = optimizers(model, options, world)
    part = rank // (world // parts)
    for step in range(options.steps):
        rows = batch(options, step)
        mine = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
        for chunk in mine.chunk(options.microbatches):
            with (
                torch.autocast("cpu", torch.bfloat16)
                if options.precision == "amp"
                else contextlib.nullcontext()
            ):
                logits = model(chunk[:, :-1])
            wide = logits if options.precision == "fp64" else logits.float()
            loss = F.cross_entropy(wide.flatten(0, 1), chunk[:, 1:].flatten())
            (loss / options.microbatches).backward()
        clip(model, options)
        for optimizer in updaters:
            optimizer.step()
            optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


def clip(model: nn.Module, options: argparse.Namespace) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(options.max_norm)
        return
    parameters = list(model.parameters())
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if len(meshes) == 1:
        nn.utils.clip_grad_norm_(parameters, options.max_norm)
        return
    squares = torch.zeros(())
    for parameter in parameters:  # on different meshes: torch's own clip refuses
        norm = parameter.grad.norm()
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    factor = torch.clamp(options.max_norm / (squares.sqrt() + 1e-6), max=1.0)
    for parameter in parameters:
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        local.mul_(factor)


if __name__ == "__main__":
    main()
