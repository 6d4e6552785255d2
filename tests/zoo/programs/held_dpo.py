"""Train a policy on preferences (DPO), against a frozen copy of its beginnings.

    python held_dpo.py
    torchrun --nproc-per-node 2 held_dpo.py --plant NAME

Prompts are padded at the left, answers at the right; a row's number is the sum over the tokens of its answer.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn

Rows = tuple[Tensor, Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
        return self.out(scores.softmax(-1) @ v)


class TokenLogp(nn.Module):
    """The log-probability of each token after the first."""

    def forward(self, scores: Tensor, tokens: Tensor) -> Tensor:
        return scores[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Total(nn.Module):
    """The sum over the tokens of the answer."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, logp: Tensor, answers: Tensor) -> Tensor:
        if self.plant == "padding-summed":
            return logp.sum(1)
        return (logp * answers[:, 1:]).sum(1)


class Policy(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.plant = options.plant
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Embedding(options.prompt + options.answer, options.width)
        self.drop = nn.Dropout(options.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = Attention(options.width)
        self.mlp = nn.Sequential(nn.Linear(options.width, 25), nn.GELU(), nn.Linear(25, options.width))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary)
        self.token_logp = TokenLogp()
        self.total = Total(options.plant)

    def forward(self, tokens: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        places = (mask.cumsum(1) - 1).clamp(min=0)
        if self.plant == "positions-of-padding":
            places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.drop(self.token(tokens) + self.position(places))
        size = tokens.shape[1]
        seen = torch.ones(size, size).tril().bool() & (mask[:, None, :] == 1) | torch.eye(size).bool()
        x = x + self.attention(self.norm1(x), seen)
        x = x + self.mlp(self.norm2(x))
        return self.total(self.token_logp(self.head(self.norm(x)), tokens), answers)


class Margin(nn.Module):
    """By how much the answer that was chosen is likelier than the one that was rejected."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return rejected - chosen if self.plant == "margin-reversed" else chosen - rejected


def batch(options: argparse.Namespace, step: int) -> tuple[Rows, Rows]:
    """Return this rank's tokens, mask and mask of answers, for chosen and for rejected answers."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=drawn)

    pairs, before, after = options.pairs, options.prompt, options.answer
    prompts = random(1, options.vocabulary, pairs, before)
    given = (torch.arange(before) >= before - random(2, before + 1, pairs)[:, None]).long()
    halves = []
    for _ in range(2):
        said = (torch.arange(after) < random(2, after + 1, pairs)[:, None]).long()
        tokens = torch.cat([prompts * given, random(1, options.vocabulary, pairs, after) * said], 1)
        rows = tokens, torch.cat([given, said], 1), torch.cat([torch.zeros_like(given), said], 1)
        halves.append(tuple(part[RANK::WORLD] for part in rows))
    return halves[0], halves[1]  # type: ignore[return-value]


def totals(options: argparse.Namespace, model: nn.Module, chosen: Rows, rejected: Rows) -> list[Tensor]:
    """Return the numbers of chosen and of rejected rows, which go through the model together or apart."""
    if options.two_calls:
        return [model(*chosen), model(*rejected)]
    both = [torch.cat(parts) for parts in zip(chosen, rejected, strict=True)]
    return list(model(*both).chunk(2))


def main() -> None:
    options = arguments(
        __doc__, "two-calls", "inference-mode",
        steps=3, width=14, vocabulary=30, prompt=5, answer=6, pairs=6, dropout=0.0,
    )  # fmt: skip
    with ranks(options):
        inner = Policy(options)
        reference = copy.deepcopy(inner).requires_grad_(False)
        if options.plant != "reference-trains":
            reference.eval()
        margin = Margin(options.plant)
        model = replicated(inner)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        for step in range(options.steps):
            rows = batch(options, step)
            own = margin(*totals(options, model, *rows))
            with torch.inference_mode() if options.inference_mode else torch.no_grad():
                first = margin(*totals(options, reference, *rows))
            (-F.logsigmoid(0.5 * (own - first)).mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
