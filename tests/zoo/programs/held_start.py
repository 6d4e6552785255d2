"""What the held-out programs share: their options, their ranks, and how a run begins and ends."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def arguments(about: str | None, *switches: str, **numbers: float) -> argparse.Namespace:
    """Return the options that all have, with ``switches`` and ``numbers``, which are given their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plant", default="", help="the mistake to plant")
    parser.add_argument("--since", type=int, default=0, help="the step from which it acts")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    for name, default in {"steps": 4, "seed": 0, **numbers}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    for name in switches:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


@contextmanager
def ranks(options: argparse.Namespace) -> Iterator[None]:
    """Join the other ranks, if there are any, and draw what follows from the seed, alike on all."""
    if options.double:
        torch.set_default_dtype(torch.float64)
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    yield
    if WORLD > 1:
        dist.barrier()  # what is still held by a thread of the group is let go
        dist.destroy_process_group()


def replicated(model: nn.Module) -> nn.Module:
    """Return the model, wrapped where there are other ranks."""
    return DistributedDataParallel(model) if WORLD > 1 else model
