"""Ends the program where it cannot begin as its user asked."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed as dist

from tensortrace.tracer.notices import say

STATUS = 2


def refuse(reason: str) -> NoReturn:
    """Say in one line why the run cannot start as asked, and leave with exit code 2.

    A run that quietly began elsewhere would be compared as if it had not. SystemExit is what neither the
    recorder's guard nor a training loop's ``except Exception`` holds back.
    """
    say(f"rank {rank()}: cannot start as asked: {reason}")
    raise SystemExit(STATUS)


def rank() -> int:
    """Return this process's global rank, 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return how many ranks there are, 1 where nothing is distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
