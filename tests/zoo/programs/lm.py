"""Train a small language model with LayerNorm, learned positions and dropout-free blocks.

The objective is the mean over the valid tokens of the whole batch, however it is spread over ranks and
microbatches. Every option that changes how, but not what, is computed has a switch.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

IGNORED = -100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=61)
    parser.add_argument("--length", type=int, default=13)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--sampler", choices=["contiguous", "strided", "shuffled"], default="contiguous")
    parser.add_argument("--pad-to", type=int, default=0, help="pad every batch to this length")
    parser.add_argument("--attention", choices=["explicit", "math", "flash", "default"], default="explicit")
    parser.add_argument("--checkpoint", choices=["reentrant", "non-reentrant", "selective"])
    parser.add_argument("--loss", choices=["mean", "sum", "none", "hand", "chunked"], default="sum")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "adam", "sgd", "nesterov"])
    parser.add_argument("--implementation", choices=["for-loop", "foreach", "fused"])
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--clip", choices=["no", "torch", "foreach", "for-loop", "hand"], default="torch")
    parser.add_argument("--max-norm", type=float, default=0.6)
    parser.add_argument(
        "--schedule", choices=["none", "lambda", "hand", "cosine", "cosine-hand"], default="none"
    )
    parser.add_argument("--scaler", type=float, default=0.0, help="initial scale")
    parser.add_argument("--zero", choices=["none", "zero"], default="none")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--reduce", choices=["ddp", "sum-then-divide", "flat", "hand"], default="ddp")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--amplify", type=float, default=1.0, help="scale of the embeddings")
    parser.add_argument(
        "--quiet-head", action="store_true", help="a head so small that gradients nearly vanish"
    )
    parser.add_argument("--k-bias", action="store_true")
    return parser.parse_args()


class Attention(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.heads, self.kind = options.heads, options.attention
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width, bias=options.k_bias)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "explicit":
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            length = x.shape[1]
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        else:
            kernels = {"math": [SDPBackend.MATH], "flash": [SDPBackend.FLASH_ATTENTION]}
            with sdpa_kernel(kernels[self.kind]) if self.kind in kernels else contextlib.nullcontext():
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(options)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width + 1), nn.GELU(), nn.Linear(3 * width + 1, width))
        self.selective = options.checkpoint == "selective"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        inner = self.norm2(x)
        if self.selective:
            return x + checkpoint(self.mlp, inner, use_reentrant=False)
        return x + self.mlp(inner)


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Embedding(options.length + 8, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        if options.tied:
            self.head.weight = self.token.weight
        self.checkpoint = options.checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            if self.checkpoint in ("reentrant", "non-reentrant"):
                x = checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


def build(options: argparse.Namespace) -> Model:
    torch.manual_seed(options.seed)
    model = Model(options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        model.token.weight.mul_(options.amplify)
        if options.quiet_head:
            model.head.weight.mul_(1e-6)
    return model.to(getattr(torch, options.dtype))


def documents(options: argparse.Namespace, step: int) -> list[list[int]]:
    """Return the token rows of a step, of several lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 * options.seed + step)

    def drawn(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    lengths = drawn(3, options.length + 2, options.rows)
    return [drawn(1, options.vocabulary, length) for length in lengths]


def share(rows: list[list[int]], part: int, parts: int, sampler: str) -> list[list[int]]:
    if sampler == "strided":
        return rows[part::parts]
    if sampler == "shuffled":
        rows = rows[::-1][1:] + rows[-1:]
    each = len(rows) // parts
    return rows[part * each : (part + 1) * each]


def collate(rows: list[list[int]], pad_to: int) -> tuple[Tensor, Tensor]:
    length = max(pad_to, max(map(len, rows)) - 1)
    inputs = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), IGNORED)
    for n, row in enumerate(rows):
        inputs[n, : len(row) - 1] = torch.tensor(row[:-1])
        targets[n, : len(row) - 1] = torch.tensor(row[1:])
    return inputs, targets


def loss_of(logits: Tensor, targets: Tensor, total: int, kind: str) -> Tensor:
    """Return the sum of the tokens' losses over ``total``, computed in one of several ways."""
    flat, wanted = (
        logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1),
        targets.flatten(),
    )
    if kind == "mean":
        return F.cross_entropy(flat, wanted, ignore_index=IGNORED) * ((wanted != IGNORED).sum() / total)
    if kind == "none":
        return F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="none").sum() / total
    if kind == "hand":
        valid = wanted != IGNORED
        logs = F.log_softmax(flat, dim=-1)
        picked = logs.gather(1, wanted.masked_fill(~valid, 0)[:, None])[:, 0]
        return -(picked * valid).sum() / total
    if kind == "chunked":
        parts = zip(flat.split(17), wanted.split(17), strict=True)
        return sum(F.cross_entropy(f, w, ignore_index=IGNORED, reduction="sum") for f, w in parts) / total
    return F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum") / total


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    flags = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}
    chosen = flags.get(options.implementation, {})
    parameters = list(model.parameters())
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1, **chosen)
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=options.rate, **chosen)
    nesterov = options.optimizer == "nesterov"
    return torch.optim.SGD(parameters, lr=10 * options.rate, momentum=0.9, nesterov=nesterov, **chosen)


def clip(model: nn.Module, options: argparse.Namespace) -> None:
    parameters = [p for p in model.parameters() if p.grad is not None]
    if options.clip == "hand":
        norm = torch.sqrt(sum(p.grad.float().pow(2).sum() for p in parameters))
        factor = torch.clamp(options.max_norm / (norm + 1e-6), max=1.0)
        for parameter in parameters:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))
    elif options.clip != "no":
        foreach = {"torch": None, "foreach": True, "for-loop": False}[options.clip]
        nn.utils.clip_grad_norm_(parameters, options.max_norm, foreach=foreach)


def factor_at(step: int, kind: str, steps: int) -> float:
    if kind.startswith("cosine"):
        return (1 + math.cos(math.pi * step / steps)) / 2
    return min((step + 1) / 4, 1.0) * 0.9**step


def reduce(model: nn.Module, how: str, world: int) -> None:
    """Sum gradients over ranks by hand."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if how == "flat":
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    else:
        for gradient in gradients:
            dist.all_reduce(gradient)


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    model = build(options)
    by_ddp = world > 1 and options.reduce == "ddp"
    trained: nn.Module = model
    if by_ddp:
        trained = DistributedDataParallel(
            model, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=options.bucket_view,
            static_graph=options.static_graph,
        )  # fmt: skip
    optimizer = optimizer_of(model, options)
    scheduler = None
    if options.schedule in ("lambda", "cosine"):
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: factor_at(step, options.schedule, options.steps)
        )
    base = optimizer.param_groups[0]["lr"] if scheduler is None else 0.0
    scaler = torch.amp.GradScaler("cpu", init_scale=options.scaler or 1.0, enabled=bool(options.scaler))
    for step in range(options.steps):
        if options.schedule.endswith("hand"):
            for group in optimizer.param_groups:
                group["lr"] = base * factor_at(step, options.schedule, options.steps)
        rows = documents(options, step)
        total = sum(len(row) - 1 for row in rows)
        divisor = 1 if options.reduce == "sum-then-divide" else total
        mine = share(rows, rank, world, options.sampler)
        each = len(mine) // options.microbatches
        for number in range(options.microbatches):
            inputs, targets = collate(mine[number * each : (number + 1) * each], options.pad_to)
            last = number == options.microbatches - 1
            quiet = by_ddp and options.no_sync and not last
            with trained.no_sync() if quiet else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                    logits = trained(inputs)
                loss = loss_of(logits, targets, divisor, options.loss) * (world if by_ddp else 1)
                scaler.scale(loss).backward()
        if world > 1 and not by_ddp:
            reduce(model, options.reduce, world)
        if options.reduce == "sum-then-divide":
            for parameter in model.parameters():
                parameter.grad.div_(total)
        scaler.unscale_(optimizer)
        clip(model, options)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=options.zero == "none")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
