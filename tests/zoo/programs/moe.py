"""Train a mixture of experts without capacity: every token goes to its two best, in one of several ways."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=14)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=43)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--dispatch", choices=["loop", "dense"], default="loop")
    parser.add_argument("--combine", choices=["add", "stack"], default="add")
    parser.add_argument("--z-loss", type=float, default=1e-3)
    return parser.parse_args()


class Experts(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.options = options.width, options
        self.router = nn.Linear(width, options.experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(options.experts, width, 2 * width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(options.experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        weight, choice = logits.softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        if self.options.dispatch == "dense":
            answers = torch.einsum("tw,ewh->teh", tokens, self.w1)
            answers = torch.einsum("teh,ehw->tew", F.silu(answers), self.w2)
            share = torch.zeros_like(logits).scatter(1, choice, weight)
            mixed = torch.einsum("te,tew->tw", share, answers)
        elif self.options.combine == "add":
            mixed = torch.zeros_like(tokens)
            for e in range(self.options.experts):
                token, k = (choice == e).nonzero(as_tuple=True)
                mixed = mixed.index_add(0, token, self._one(e, tokens[token]) * weight[token, k, None])
        else:
            flat = choice.flatten()
            answers = tokens.new_zeros(len(flat), tokens.shape[1])
            for e in range(self.options.experts):
                mine = (flat == e).nonzero()[:, 0]
                answers = answers.index_copy(0, mine, self._one(e, tokens[mine // 2]))
            mixed = (answers.unflatten(0, (-1, 2)) * weight[..., None]).sum(1)
        return mixed.view_as(x), logits.logsumexp(-1).view(x.shape[:2])

    def _one(self, e: int, tokens: Tensor) -> Tensor:
        return F.silu(tokens @ self.w1[e]) @ self.w2[e]


class Model(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.vocabulary, options.width)
        self.mix = nn.GRU(options.width, options.width, batch_first=True)
        self.norm = nn.LayerNorm(options.width)
        self.experts = Experts(options)
        self.head = nn.Linear(options.width, options.vocabulary)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mix(self.embed(tokens))[0]
        y, z = self.experts(self.norm(x))
        return self.head(x + y), z


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model: nn.Module = Model(options)
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in range(options.steps):
        rows = torch.randint(0, options.vocabulary, (options.rows, options.length + 1), generator=generator)
        share = rows[rank * options.rows // world : (rank + 1) * options.rows // world]
        for some in share.chunk(options.microbatches):
            scores, z = trained(some[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), some[:, 1:].flatten())
            loss = loss + options.z_loss * (z**2).mean()
            (loss / options.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
