"""Trains a hand-written tensor, sequence, pipeline and data parallel model; --plant makes one mistake in it.

Column and row parallel linear layers with autograd functions, fused QKV interleaved by group (grouped query
attention), SwiGLU with gate and up fused, a tied vocabulary-parallel embedding padded from 50 to 64 rows,
vocabulary-parallel cross entropy. Local layers are layers.0.. on every stage. Without ranks it is the same
model whole, of the same initial weights.
"""

from __future__ import annotations

import argparse
import os
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY, PADDED = 50, 64
HIDDEN, HEADS, FFN, LAYERS = 32, 8, 48, 4
HEAD = HIDDEN // HEADS
BATCH, SEQUENCE, MICROBATCHES = 2, 8, 2
PLANTS = ("qkv", "gate-up", "bias", "norm-grads", "tied", "kv", "head-grads")


class Grid:
    """Where this rank stands: rank = (pp * dp_size + dp) * tp_size + tp."""

    def __init__(self, args: argparse.Namespace) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self.rank, self.sp = rank, args.sp
        self.tp_size, self.pp_size, self.dp_size = args.tp, args.pp, args.dp
        self.tp = rank % args.tp
        self.dp = rank // args.tp % args.dp
        self.pp = rank // (args.tp * args.dp)
        ranks = torch.arange(args.pp * args.dp * args.tp).reshape(args.pp, args.dp, args.tp)
        self.tp_group = self._mine(ranks.reshape(-1, args.tp))
        self.dp_group = self._mine(ranks.transpose(1, 2).reshape(-1, args.dp))
        ends = ranks[[0, -1]] if args.pp > 1 else ranks[:1]
        self.ends_group = self._mine(ends.permute(1, 2, 0).reshape(-1, len(ends)))

    def _mine(self, rows: torch.Tensor) -> dist.ProcessGroup | None:
        """Make a group of each row, since all ranks must; return the one that this rank is in."""
        mine = None
        for row in rows.tolist():
            if len(row) > 1:
                group = dist.new_group(row)
                mine = group if self.rank in row else mine
        return mine

    @property
    def first(self) -> bool:
        return self.pp == 0

    @property
    def last(self) -> bool:
        return self.pp == self.pp_size - 1

    def neighbour(self, by: int) -> int:
        return self.rank + by * self.tp_size * self.dp_size


class Copy(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """Sum over the tensor parallel ranks whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    """Concatenation of the sequence's parts whose gradient is summed and scattered."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        return _gathered(x, grid)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scattered(grad, ctx.grid), None


class Scatter(torch.autograd.Function):
    """Sum over ranks, of which each keeps its part of the sequence; the gradient is gathered."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.grid = grid
        return _reduce_scattered(x, grid)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.grid), None


def _gathered(x, grid):
    parts = [torch.empty_like(x) for _ in range(grid.tp_size)]
    dist.all_gather(parts, x.contiguous(), group=grid.tp_group)
    return torch.cat(parts, dim=1)


def _reduce_scattered(x, grid):
    x = x.clone()
    dist.all_reduce(x, group=grid.tp_group)
    return x.chunk(grid.tp_size, dim=1)[grid.tp].contiguous()


def enter(x, grid):
    """What stands before a column parallel layer."""
    if grid.tp_size == 1:
        return x
    return Gather.apply(x, grid) if grid.sp else Copy.apply(x, grid.tp_group)


def leave(x, grid):
    """What stands behind a row parallel layer."""
    if grid.tp_size == 1:
        return x
    return Scatter.apply(x, grid) if grid.sp else Reduce.apply(x, grid.tp_group)


class ColumnParallelLinear(nn.Module):
    def __init__(self, grid, inputs, outputs):
        super().__init__()
        self.grid = grid
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        return F.linear(enter(x, self.grid), self.weight, self.bias)


class FusedQKV(ColumnParallelLinear):
    """Rows by group: its queries, its key, its value. Shared keys and values are summed over ranks."""

    def __init__(self, grid, heads, groups, shared, plant):
        super().__init__(grid, HIDDEN, (heads + 2 * groups) * HEAD)
        self.queries = heads * HEAD
        self.summed = shared and plant != "kv"

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if self.summed:
            weight, bias = (self._shared(p) for p in (weight, bias))
        return F.linear(enter(x, self.grid), weight, bias)

    def _shared(self, p):
        shared = Copy.apply(p[self.queries :], self.grid.tp_group)
        return torch.cat([p[: self.queries], shared])


class RowParallelLinear(nn.Module):
    def __init__(self, grid, inputs, outputs, plant):
        super().__init__()
        self.grid, self.plant = grid, plant
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x):
        if self.plant == "bias":
            return leave(F.linear(x, self.weight, self.bias), self.grid)
        return leave(F.linear(x, self.weight), self.grid) + self.bias


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, grid, kv_heads, plant):
        super().__init__()
        self.heads = HEADS // grid.tp_size
        shared = kv_heads < grid.tp_size
        self.groups = 1 if shared else kv_heads // grid.tp_size
        self.qkv = FusedQKV(grid, self.heads, self.groups, shared, plant)
        self.proj = RowParallelLinear(grid, self.heads * HEAD, HIDDEN, plant)

    def forward(self, x):
        qkv = self.qkv(x)
        batch, sequence, _ = qkv.shape
        per_group = self.heads // self.groups
        qkv = qkv.view(batch, sequence, self.groups, per_group + 2, HEAD).permute(0, 2, 3, 1, 4)
        q, k, v = qkv[:, :, :per_group], qkv[:, :, -2:-1], qkv[:, :, -1:]
        scores = q @ k.transpose(-1, -2) / HEAD**0.5
        future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        return self.proj(mixed.permute(0, 3, 1, 2, 4).reshape(batch, sequence, -1))


class MLP(nn.Module):
    def __init__(self, grid, plant):
        super().__init__()
        self.gate_up = ColumnParallelLinear(grid, HIDDEN, 2 * FFN // grid.tp_size)
        self.down = RowParallelLinear(grid, FFN // grid.tp_size, HIDDEN, plant)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, grid, args):
        super().__init__()
        self.norm1, self.attn = Norm(), Attention(grid, args.kv_heads, args.plant)
        self.norm2, self.mlp = Norm(), MLP(grid, args.plant)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Rows of the vocabulary that this rank holds; ids of other rows give zeros, and the ranks add up."""

    def __init__(self, grid):
        super().__init__()
        self.grid = grid
        self.rows = (PADDED if grid.tp_size > 1 else VOCABULARY) // grid.tp_size
        self.weight = nn.Parameter(torch.empty(self.rows, HIDDEN))

    def forward(self, ids):
        local = ids - self.grid.tp * self.rows
        outside = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        return leave(found.masked_fill(outside[..., None], 0.0), self.grid)


class CrossEntropy(torch.autograd.Function):
    """Loss per token from logits of which each rank has some of the vocabulary."""

    @staticmethod
    def forward(ctx, logits, targets, grid):
        rows = logits.shape[-1]
        names = torch.arange(rows) + grid.tp * rows
        logits = logits.masked_fill(names >= VOCABULARY, float("-inf"))
        highest = _all(logits.amax(-1), dist.ReduceOp.MAX, grid)
        exponentials = (logits - highest[..., None]).exp()
        total = _all(exponentials.sum(-1), dist.ReduceOp.SUM, grid)
        mine = names == targets[..., None]
        wanted = _all(logits.masked_fill(~mine, 0.0).sum(-1), dist.ReduceOp.SUM, grid)
        ctx.save_for_backward(exponentials / total[..., None] - mine.to(logits.dtype))
        return total.log() + highest - wanted

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return slope * grad[..., None], None, None


def _all(x, op, grid):
    if grid.tp_size > 1:
        dist.all_reduce(x, op=op, group=grid.tp_group)
    return x


class Loss(nn.Module):
    def __init__(self, grid):
        super().__init__()
        self.grid = grid

    def forward(self, logits, targets):
        return CrossEntropy.apply(logits, targets, self.grid)


class Head(nn.Module):
    """Logits of this rank's rows of the vocabulary, from the embedding's weight."""

    def __init__(self, grid, weight, plant):
        super().__init__()
        self.grid, self.weight, self.plant = grid, weight, plant

    def forward(self, x):
        return F.linear(x if self.plant == "head-grads" else enter(x, self.grid), self.weight)


class Stage(nn.Module):
    """The layers of one pipeline stage, which is given the batch, and hidden states from the stage before."""

    def __init__(self, grid, args):
        super().__init__()
        self.grid, self.received = grid, None
        if grid.first or grid.last:
            self.embed = Embedding(grid)
        self.layers = nn.ModuleList(Layer(grid, args) for _ in range(LAYERS // grid.pp_size))
        if grid.last:
            self.norm = Norm()
            self.head = Head(grid, self.embed.weight, args.plant)
            self.loss = Loss(grid)

    def forward(self, ids, targets):
        x = self.embed(ids) if self.grid.first else self.received
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.head(self.norm(x)), targets) if self.grid.last else x


def whole(name, kv_heads, seed=""):
    """Return a parameter of the whole model, drawn after its name, and the seed where it has one."""
    qkv = (HEADS + 2 * kv_heads) * HEAD
    shapes = {
        "embed.weight": (VOCABULARY, HIDDEN), "attn.qkv.weight": (qkv, HIDDEN), "attn.qkv.bias": (qkv,),
        "attn.proj.weight": (HIDDEN, HIDDEN), "mlp.gate_up.weight": (2 * FFN, HIDDEN),
        "mlp.gate_up.bias": (2 * FFN,), "mlp.down.weight": (HIDDEN, FFN),
    }  # fmt: skip
    shape = shapes.get(leaf_of(name), (HIDDEN,))
    generator = torch.Generator().manual_seed(zlib.crc32((name + seed).encode()))
    drawn = torch.randn(shape, generator=generator) * 0.2
    return drawn + 1.0 if "norm" in name else drawn


def leaf_of(name):
    """Return a parameter's name without its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def part(name, value, grid, args):
    """Return this rank's part of a parameter of the whole model, as it should be or as planted."""
    leaf = leaf_of(name)
    ways, mine = grid.tp_size, grid.tp
    if leaf.startswith("attn.qkv"):
        return _part_of_qkv(value, ways, mine, args)
    if leaf.startswith("mlp.gate_up"):
        gate, up = (half.chunk(ways)[mine] for half in value.chunk(2))
        return torch.cat([up, gate] if args.plant == "gate-up" and ways > 1 else [gate, up])
    if leaf in ("attn.proj.weight", "mlp.down.weight"):
        return value.chunk(ways, dim=1)[mine]
    if leaf == "embed.weight" and ways > 1:
        padding = torch.full((PADDED - VOCABULARY, HIDDEN), 0.5)
        return torch.cat([value, padding]).chunk(ways)[mine]
    return value


def _part_of_qkv(value, ways, mine, args):
    groups = value.unflatten(0, (args.kv_heads, -1, HEAD))
    if args.kv_heads >= ways:
        groups = groups.chunk(ways)[mine]
        q, k, v = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    else:
        q, k, v = groups[:, :-2].chunk(ways, dim=1)[mine], groups[:, -2:-1], groups[:, -1:]
    planted = args.plant == "qkv" and ways > 1
    return torch.cat([q, v, k] if planted else [q, k, v], dim=1).flatten(0, 2)


def global_name(name, grid):
    if not name.startswith("layers."):
        return name
    _, number, rest = name.split(".", 2)
    return f"layers.{int(number) + grid.pp * (LAYERS // grid.pp_size)}.{rest}"


def reduce_gradients(model, grid, args):
    """Sum what ranks have parts of: of the sequence, of the tied embedding's uses, of the data."""
    for name, p in model.named_parameters():
        by_parts = "norm" in name or name.endswith(("proj.bias", "down.bias"))
        if grid.sp and grid.tp_size > 1 and by_parts and args.plant != "norm-grads":
            dist.all_reduce(p.grad, group=grid.tp_group)
        if name == "embed.weight" and grid.pp_size > 1 and args.plant != "tied":
            dist.all_reduce(p.grad, group=grid.ends_group)
        if grid.dp_size > 1:
            dist.all_reduce(p.grad, group=grid.dp_group)
            p.grad /= grid.dp_size


def run_microbatch(model, grid, ids, targets):
    """Run one microbatch forward and backward through all stages; return the loss on the last one."""
    shape = (len(ids), SEQUENCE // (grid.tp_size if grid.sp else 1), HIDDEN)
    if not grid.first:
        model.received = torch.empty(shape)
        dist.recv(model.received, grid.neighbour(-1))
        model.received.requires_grad_()
    out = model(ids, targets)
    if grid.last:
        out = out.mean()
        (out / MICROBATCHES).backward()
    else:
        dist.send(out.detach().contiguous(), grid.neighbour(1))
        slope = torch.empty(shape)
        dist.recv(slope, grid.neighbour(1))
        out.backward(slope)
    if not grid.first:
        dist.send(model.received.grad, grid.neighbour(-1))
    return out.item() if grid.last else None


def main() -> None:
    args = arguments()
    ranked = args.tp * args.pp * args.dp > 1
    if ranked:
        dist.init_process_group("gloo")
    grid = Grid(args)
    model = Stage(grid, args)
    seed = f"{args.tp} {args.pp} {grid.rank}" if args.own_seed else ""
    with torch.no_grad():
        for name, p in model.named_parameters():
            named = global_name(name, grid)
            value = whole(named, args.kv_heads, seed)
            if args.constant and (name.endswith("bias") or "norm" in name):
                value.fill_(1.0 if "norm" in name else 0.0)
            p.copy_(part(named, value, grid, args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(args.steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            draws = torch.Generator().manual_seed(1000 * step + microbatch)
            tokens = torch.randint(0, VOCABULARY, (BATCH * args.batches, SEQUENCE + 1), generator=draws)
            tokens = tokens.chunk(grid.dp_size)[grid.dp]
            losses.append(run_microbatch(model, grid, tokens[:, :-1], tokens[:, 1:]))
        reduce_gradients(model, grid, args)
        optimizer.step()
        optimizer.zero_grad()
        if grid.last:
            print(f"rank {grid.rank} step {step} loss {sum(losses) / MICROBATCHES:.6f}")
    finish(model, grid, args)
    if ranked:
        dist.destroy_process_group()


def finish(model, grid, args):
    """Save the final weights of one rank, or compare this rank's parts of them with such a file."""
    if args.save:
        torch.save({name: p.detach() for name, p in model.named_parameters()}, args.save)
    if args.expect:
        wanted = torch.load(args.expect, weights_only=True)
        for name, p in model.named_parameters():
            named = global_name(name, grid)
            mine, theirs = p.detach(), part(named, wanted[named], grid, args)
            if name == "embed.weight":
                rows = max(VOCABULARY - grid.tp * len(mine), 0)
                mine, theirs = mine[:rows], theirs[:rows]
            torch.testing.assert_close(
                mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, at=named: f"{at}: {text}"
            )
        print(f"rank {grid.rank} holds what one rank holds")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for axis in ("tp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    parser.add_argument("--constant", action="store_true", help="begin with biases of zeros, norms of ones")
    parser.add_argument("--kv-heads", type=int, default=4, help="1 where tensor parallel ranks share it")
    parser.add_argument(
        "--batches", type=int, default=0, help="of the whole program; 0 for one per data rank"
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--own-seed", action="store_true", help="each rank draws its own numbers")
    parser.add_argument("--save")
    parser.add_argument("--expect")
    args = parser.parse_args()
    args.batches = args.batches or args.dp
    return args


if __name__ == "__main__":
    main()
