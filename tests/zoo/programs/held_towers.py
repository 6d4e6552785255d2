"""Train two towers, of images' features and of captions, by the contrast of all ranks' rows.

python held_towers.py
torchrun --nproc-per-node 2 held_towers.py --plant NAME
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn


class Unit(nn.Module):
    """Scales each row to length 1; ``half`` is set where the similarities are to be cheap."""

    half = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1)
        return x.half().float() if self.half else x


class Captions(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.mix = nn.Linear(options.width, options.width)
        self.norm = nn.LayerNorm(options.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.mix(self.token(tokens))).mean(1))


class Towers(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.text_first = options.text_first
        self.image = nn.Sequential(nn.Linear(options.features, 21), nn.GELU(), nn.Linear(21, options.width))
        self.text = Captions(options)
        self.unit = Unit()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.text_first:
            text = self.text(tokens)
            image = self.image(images)
        else:
            image = self.image(images)
            text = self.text(tokens)
        return self.unit(image), self.unit(text), self.temperature.exp()


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's images and captions: a block of the rows of the step."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    images = torch.randn(options.rows, options.features, generator=drawn)
    tokens = torch.randint(0, options.vocabulary, (options.rows, 6), generator=drawn)
    return images.chunk(WORLD)[RANK], tokens.chunk(WORLD)[RANK]


class Gather(torch.autograd.Function):
    """All ranks' rows; their gradients are summed over the ranks, and each takes those of its own."""

    @staticmethod
    def forward(ctx: object, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(WORLD)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient.chunk(WORLD)[RANK]


def objective(options: argparse.Namespace, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Return the contrast of rows with all rows; gradients flow back to the ranks that they came from."""
    images = Gather.apply(image) if WORLD > 1 else image
    texts = Gather.apply(text) if WORLD > 1 else text
    if options.whole_loss:
        image, text = images, texts
    labels = torch.arange(len(image))
    if not options.whole_loss and options.plant != "labels-local":
        labels = labels + RANK * len(image)
    forth = F.cross_entropy(scale * image @ texts.T, labels)
    back = F.cross_entropy(scale * text @ images.T, labels)
    return (forth + back) / 2


def optimizers(options: argparse.Namespace, model: nn.Module) -> list[torch.optim.Optimizer]:
    if options.two_optimizers:
        text = [value for name, value in model.named_parameters() if "text." in name]
        rest = [value for name, value in model.named_parameters() if "text." not in name]
        return [torch.optim.AdamW(rest, lr=3e-3), torch.optim.Adam(text, lr=2e-3)]
    matrices = [value for value in model.parameters() if value.ndim >= 2]
    others = [value for value in model.parameters() if value.ndim < 2]
    if options.plant == "temperature-unlisted":
        others = [value for value in model.parameters() if value.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=3e-3)]


def main() -> None:
    options = arguments(
        __doc__, "two-optimizers", "whole-loss", "text-first",
        steps=5, features=9, width=16, vocabulary=30, rows=8,
    )  # fmt: skip
    with ranks(options):
        inner = Towers(options)
        model = replicated(inner)
        updating = optimizers(options, model)
        for step in range(options.steps):
            inner.unit.half = options.plant == "unit-half" and step >= options.since
            objective(options, *model(*batch(options, step))).backward()
            for optimizer in updating:
                optimizer.step()
            for optimizer in updating[:1] if options.plant == "one-zeroed" else updating:
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
