"""Experts owned by ranks: tokens travel to them and back by all-to-all, in unequal numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parallel_model import EXPERTS, Decoder, Experts
from parallel_parts import Layout
from torch import Tensor, nn


class Exchange(torch.autograd.Function):
    """Send rows to ranks: ``sent`` rows to each, ``received`` from each; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class EP(Layout):
    """Rows and experts are the ranks' own; gradients of the rest are summed by hand."""

    def wrap(self, model: Decoder) -> None:
        self.part, self.parts = self.rank, self.world
        self.each = EXPERTS // self.world
        for layer in model.layers.values():
            moe = layer.mlp
            for number in list(moe.experts):
                if int(number) // self.each != self.rank:
                    del moe.experts[number]
            moe.exchange = lambda tokens, counts, moe=moe: self.exchange(moe, tokens, counts)

    def exchange(self, moe: Experts, tokens: Tensor, counts: Tensor) -> Tensor:
        """Send each token to the owner of its expert and return the answers in the tokens' order."""
        arriving = torch.empty_like(counts)  # [source rank, own expert]
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(self.world, self.each).sum(1).tolist()
        received = arriving.view(self.world, self.each).sum(1).tolist()
        there = Exchange.apply(tokens, sent, received)
        expert_of = torch.arange(self.each).repeat(self.world).repeat_interleave(arriving)
        order = expert_of.argsort(stable=True)
        answers = moe.compute(there[order], expert_of.bincount(minlength=self.each))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        if self.plant == "outputs-to-wrong-tokens":
            back = back.roll(1)
        return Exchange.apply(answers[back], received, sent)

    def shared(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if ".experts." not in name]

    def reduce(self) -> None:
        for name, parameter in self.model.named_parameters():
            if ".experts." in name:
                if self.plant == "experts-divided" and parameter.grad is not None:
                    parameter.grad /= self.world
            elif not (self.plant == "router-not-reduced" and "router" in name):
                dist.all_reduce(parameter.grad)

    def clip(self, max_norm: float) -> None:
        shared = {id(p) for p in self.shared()} if self.rank else set()
        owned = [p for p in self.parameters() if id(p) not in shared]
        self.clip_together(max_norm, owned, dist.group.WORLD)
