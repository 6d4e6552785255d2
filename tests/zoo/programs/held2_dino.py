"""Train a student to tell of one view what its own average, the teacher, tells of another (DINO).

    python held2_dino.py
    torchrun --nproc-per-node 2 held2_dino.py --plant NAME

The teacher's answers are centred by a running mean over the rows of all ranks. Momentum, learning rate and
weight decay follow schedules of the program's own.
"""

from __future__ import annotations

import argparse
import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from held_start import RANK, WORLD, arguments, ranks, replicated
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.enter = nn.Linear(options.features, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.neck = nn.Linear(width, 9)
        self.last = nn.Linear(9, options.prototypes, bias=False)

    def forward(self, views: Tensor) -> Tensor:
        x = self.enter(views)
        x = x + self.down(F.gelu(self.up(self.norm1(x))))
        return self.last(F.normalize(self.neck(self.norm2(x)), dim=-1))


class CentredLoss(nn.Module):
    """The cross entropy between each view of the student and the other one of the teacher, centred."""

    center: Tensor

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.plant = options.plant
        self.register_buffer("center", torch.zeros(1, options.prototypes))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        own = (student / 0.2).log_softmax(-1).chunk(2)
        other = ((teacher - self.center) / 0.1).softmax(-1).chunk(2)
        loss = -((other[0] * own[1]).sum(-1).mean() + (other[1] * own[0]).sum(-1).mean()) / 2
        self.move(teacher)
        return loss

    @torch.no_grad()
    def move(self, teacher: Tensor) -> None:
        mean = teacher.mean(0, keepdim=True)
        if WORLD > 1 and self.plant != "centre-of-own-rows":
            dist.all_reduce(mean)
            mean /= WORLD
        self.center.mul_(0.8).add_(mean, alpha=0.2)


def batch(options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Return two views of this rank's rows."""
    drawn = torch.Generator().manual_seed(options.seed * 100 + step)
    rows = torch.randn(options.rows, options.features, generator=drawn)
    shaken = [rows + 0.3 * torch.randn(rows.shape, generator=drawn) for _ in range(2)]
    one, two = (view[RANK::WORLD].to(torch.get_default_dtype()) for view in shaken)
    return one, two


@torch.no_grad()
def follow(options: argparse.Namespace, teacher: nn.Module, student: nn.Module, step: int) -> None:
    """Move the teacher towards the student; it moves less and less."""
    keep = 1 - 0.1 * (math.cos(math.pi * step / options.steps) + 1) / 2
    ours, theirs = list(teacher.parameters()), [value.detach() for value in student.parameters()]
    if options.foreach:
        torch._foreach_lerp_(ours, theirs, 1 - keep)
        return
    for own, value in zip(ours, theirs, strict=True):
        own.mul_(keep).add_(value, alpha=1 - keep)


def main() -> None:
    options = arguments(__doc__, "foreach", "apart", steps=5, features=6, width=13, prototypes=11, rows=8)
    with ranks(options):
        inner = Network(options)
        teacher = copy.deepcopy(inner).requires_grad_(False)
        student, criterion = replicated(inner), CentredLoss(options)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * (1 - step / (2 * options.steps))
                group["weight_decay"] = 0.01 * (1 + step)
            one, two = batch(options, step)
            both = torch.cat([one, two])
            own = torch.cat([student(one), student(two)]) if options.apart else student(both)
            with torch.no_grad():
                told = teacher(both)
            criterion(own, told).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if options.plant != "teacher-of-the-main-rank" or step < options.since or RANK == 0:
                follow(options, teacher, inner, step)


if __name__ == "__main__":
    main()
