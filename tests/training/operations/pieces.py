"""Functions that the modules of ``operations.py`` share; mistakes are planted here too."""

from __future__ import annotations

import math
import zlib

import torch
import torch.distributed as dist


def ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Split(torch.autograd.Function):
    """Keep this rank's positions, whose number may be uneven; the gradients of all come back."""

    @staticmethod
    def forward(ctx, x):
        ctx.sizes = [part.shape[1] for part in x.tensor_split(ranks(), 1)]
        return x.tensor_split(ranks(), 1)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return together(grad, ctx.sizes)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, length):
        ctx.sizes = [length // ranks() + (r < length % ranks()) for r in range(ranks())]
        return together(x, ctx.sizes)

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.sizes, 1)[dist.get_rank()].clone(), None


def together(x, sizes):
    parts = [x.new_empty(x.shape[0], size, *x.shape[2:]) for size in sizes]
    for rank, part in enumerate(parts):
        if rank == dist.get_rank():
            part.copy_(x)
        dist.broadcast(part, rank)
    return torch.cat(parts, 1)


def enter(x, split):
    return Copy.apply(x) if split and ranks() > 1 else x


def leave(x, split):
    return Reduce.apply(x) if split and ranks() > 1 else x


def largest(x, split):
    """Return the largest over ranks of what is no part of the gradient."""
    if split and ranks() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def weight(name, rows, columns):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)


def rms(x, gain, eps=1e-6):
    size = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(size + eps) * gain


def angles(length, width):
    positions = torch.arange(length, dtype=torch.float32)
    inverse = 1.0 / (100.0 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    return torch.outer(positions, inverse)


def rotate(x, turns):
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = turns.cos(), turns.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Rounded(torch.autograd.Function):
    """Round to eighths; the gradient passes where the value is small."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1.5)
