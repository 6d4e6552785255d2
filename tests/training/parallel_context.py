"""Context parallelism by hand: a rank holds some of the positions; keys are gathered or go round a ring."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from parallel_model import Decoder, masked_mix
from parallel_parts import Layout
from parallel_rows import IGNORE, Batch
from torch import Tensor


class Gathered(torch.autograd.Function):
    """Concatenate all ranks' positions; the gradient of a rank's own is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.summed = summed
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        if ctx.summed:
            dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()], None


def passed_on(*tensors: Tensor) -> list[Tensor]:
    """Send tensors to the next rank of the ring and return those of the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = []
    for tensor in tensors:
        got = torch.empty_like(tensor)
        ops = [
            dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % world),
            dist.P2POp(dist.irecv, got, (rank - 1) % world),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        out.append(got)
    return out


class Ring(torch.autograd.Function):
    """Attention whose keys and values go round; the softmax is corrected as they come."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, at: Tensor, ends: bool) -> Tensor:
        rows, length, heads, _ = query.shape
        top = query.new_full((rows, heads, length, 1), -math.inf)
        weight, total = torch.zeros_like(top), torch.zeros_like(query.transpose(1, 2))
        k, v, of = key, value, at
        for _ in range(dist.get_world_size()):
            scores = Ring.scores(query, k, at, of)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            seen = torch.where(new.isinf(), 0.0, new)
            share, old = (scores - seen).exp(), (top - seen).exp()
            weight = weight * old + share.sum(-1, keepdim=True)
            total = total * old + torch.einsum("bhqk,bkhd->bhqd", share, v)
            top = new
            k, v, of = passed_on(k, v, of)
        out = total / weight
        ctx.save_for_backward(query, key, value, at, out, top + weight.log())
        ctx.ends = ends
        return out.transpose(1, 2)

    @staticmethod
    def scores(query: Tensor, key: Tensor, at: Tensor, of: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        return scores.masked_fill(of[None, :] > at[:, None], -math.inf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, at, out, norm = ctx.saved_tensors
        grad = grad.transpose(1, 2)
        inner = (grad * out).sum(-1, keepdim=True)
        to_query = torch.zeros_like(query)
        k, v, of, to_k, to_v = key, value, at, torch.zeros_like(key), torch.zeros_like(value)
        for _ in range(dist.get_world_size()):
            share = (Ring.scores(query, k, at, of) - norm).exp()
            slope = share * (torch.einsum("bhqd,bkhd->bhqk", grad, v) - inner)
            slope /= math.sqrt(query.shape[-1])
            to_query += torch.einsum("bhqk,bkhd->bqhd", slope, k)
            own = torch.einsum("bhqk,bqhd->bkhd", slope, query), torch.einsum("bhqk,bhqd->bkhd", share, grad)
            if not ctx.ends or of is at:
                to_k, to_v = to_k + own[0], to_v + own[1]
            k, v, of, to_k, to_v = passed_on(k, v, of, to_k, to_v)
        return to_query, to_k, to_v, None, None


class CP(Layout):
    """Contiguous parts of the positions, keys and values gathered; gradients are summed by hand."""

    zigzag = False
    ring = False

    def wrap(self, model: Decoder) -> None:
        model.positions = self.positions
        for layer in model.layers.values():
            layer.attention.mix = self.mix

    def own(self, length: int) -> Tensor:
        """Return the global positions that this rank holds, of ``length`` in all."""
        if not self.zigzag:
            return torch.arange(length).chunk(self.world)[self.rank]
        chunks = torch.arange(length).chunk(2 * self.world)
        return torch.cat([chunks[self.rank], chunks[2 * self.world - 1 - self.rank]])

    def positions(self, length: int) -> Tensor:
        return torch.arange(length) if self.plant == "local-positions" else self.own(length * self.world)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        length = positions.shape[0] * self.world
        at, complete = self.own(length), self.plant != "kv-grads-not-summed"
        if self.ring:
            return Ring.apply(query, key, value, at, not complete)
        of = Gathered.apply(at[None, :], True)[0]
        return masked_mix(query, Gathered.apply(key, complete), Gathered.apply(value, complete), at, of)

    def padded(self, batch: Batch) -> Batch:
        parts = 2 * self.world
        batch = batch.padded(-(-batch.tokens.shape[1] // parts) * parts)
        own = self.own(batch.tokens.shape[1])
        targets = batch.targets[:, own]
        if self.plant == "labels-shifted-on-each-rank":
            targets = torch.nn.functional.pad(targets[:, :-1], (0, 1), value=IGNORE)
        return Batch(batch.tokens[:, own], targets)

    def summed(self, loss: Tensor) -> float:
        loss = loss.double()
        dist.all_reduce(loss)
        return float(loss)

    def reduce(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
            if self.plant == "averaged-over-positions":
                parameter.grad /= self.world


class CPZigzag(CP):
    """Each rank holds an early and a late part, so that all have as much to attend to."""

    zigzag = True


class CPRing(CP):
    ring = True


class CPRingZigzag(CPZigzag):
    ring = True
