"""Finds optimizers and schedulers that were constructed before, or without, our seeing it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tensortrace.tracer.hooks.order import Order
from tensortrace.tracer.placements.zero import stepping


def number_living(
    optimizers: Order[Optimizer],
    schedulers: Order[LRScheduler],
    *,
    trains: Callable[[torch.Tensor], bool],
    unhooked: Callable[[type[Optimizer]], None],
) -> None:
    """Give numbers to what belongs to this training and has none yet, the oldest first.

    A recording may begin in the middle of a program, which may hold the optimizers of other trainings:
    ``trains`` tells whether a parameter belongs to this one. And there are optimizers that leave out
    ``super().__init__()``: one that owns parameters is an optimizer like any other, one that holds only
    those of others (as accelerate's) is a wrapper and steps nothing itself. ``unhooked`` gets the class of
    such an optimizer, since torch's step hooks don't see it. Takes hundredths of a second.
    """
    initialised: list[Optimizer] = []
    uninitialised: list[Optimizer] = []
    unnumbered: list[LRScheduler] = []
    for found in _oldest_first():
        kind = type(found)  # objects may lie about their __class__
        if issubclass(kind, Optimizer):
            assert isinstance(found, Optimizer)
            if "param_groups" not in vars(found) or not any(map(trains, _parameters(found))):
                continue
            if "_optimizer_step_pre_hooks" in vars(found):
                initialised.append(found)
            else:
                uninitialised.append(found)
        elif issubclass(kind, LRScheduler):
            assert isinstance(found, LRScheduler)
            unnumbered.append(found)
    inner = {id(steps) for outer in initialised if (steps := stepping(outer)) is not outer}
    for optimizer in initialised:
        if id(optimizer) not in inner:
            optimizers.number(optimizer)
    for optimizer in uninitialised:
        owned = {id(parameter) for other in optimizers for parameter in _parameters(other)}
        if owned.isdisjoint(map(id, _parameters(optimizer))):
            optimizers.number(optimizer)
            unhooked(type(optimizer))
    known = list(optimizers)
    for scheduler in unnumbered:
        if any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in known):
            schedulers.number(scheduler)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _oldest_first() -> Iterator[object]:
    """Yield every object that the garbage collector knows, by age as far as its generations tell."""
    for generation in (2, 1, 0):
        yield from gc.get_objects(generation)
