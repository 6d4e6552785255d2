"""Train a small convolutional net with GroupNorm on images, on one or more ranks.

The objective is the mean over the images of the batch, with label smoothing.
"""

from __future__ import annotations

import argparse
import contextlib
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
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--size", type=int, default=11)
    parser.add_argument("--classes", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--smoothing", choices=["torch", "hand"], default="torch")
    parser.add_argument("--pool", choices=["module", "mean"], default="module")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--implementation", choices=["for-loop", "foreach", "fused"], default="for-loop")
    parser.add_argument("--clip-value", type=float, default=0.0)
    parser.add_argument("--steplr", choices=["torch", "hand"], default="torch")
    return parser.parse_args()


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(3, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=3)
        self.norm2 = nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)))


class Net(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, options.channels, 3, stride=2)
        self.blocks = nn.Sequential(*(Residual(options.channels) for _ in range(2)))
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(options.channels, options.classes)
        self.pool = options.pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        pooled = self.squeeze(x).flatten(1) if self.pool == "module" else x.mean((2, 3))
        return self.classifier(pooled)


def loss_of(scores: Tensor, labels: Tensor, how: str) -> Tensor:
    if how == "torch":
        return F.cross_entropy(scores, labels, label_smoothing=0.1)
    logs = scores.log_softmax(-1)
    return -(0.9 * logs.gather(1, labels[:, None])[:, 0] + 0.1 * logs.mean(-1)).mean()


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    net: nn.Module = Net(options)
    if options.channels_last:
        net = net.to(memory_format=torch.channels_last)
    trained = DistributedDataParallel(net) if world > 1 else net
    flags = {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(
        options.implementation, {"foreach": False}
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, **flags)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1) if options.steplr == "torch" else None
    generator = torch.Generator().manual_seed(options.seed + 1)
    for step in range(options.steps):
        images = torch.randn(options.batch, 3, options.size, options.size, generator=generator)
        labels = torch.randint(0, options.classes, (options.batch,), generator=generator)
        if scheduler is None:
            optimizer.param_groups[0]["lr"] = 0.05 * 0.1 ** (step // 2)
        share = slice(rank * options.batch // world, (rank + 1) * options.batch // world)
        parts = zip(
            images[share].chunk(options.microbatches), labels[share].chunk(options.microbatches), strict=True
        )
        for some, theirs in parts:
            if options.channels_last:
                some = some.contiguous(memory_format=torch.channels_last)
            amp = torch.autocast("cpu", torch.bfloat16) if options.autocast else contextlib.nullcontext()
            with amp:
                scores = trained(some)
            (loss_of(scores.float(), theirs, options.smoothing) / options.microbatches).backward()
        if options.clip_value:
            nn.utils.clip_grad_value_(net.parameters(), options.clip_value)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
