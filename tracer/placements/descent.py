"""Tells of which DTensors' local parts a plain tensor was computed last, and makes DTensors like another."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from tensortrace.tracer.placements.dtensor import Spec, spec_of
from tensortrace.tracer.placements.lineage import TO_LOCAL

MAX_NODES = 64


def descended_from(tensor: torch.Tensor) -> list[Spec]:
    """Return the places of the DTensors that the tensor was computed from, the nearest first.

    The autograd graph is followed, through any operation, up to where a DTensor became a plain tensor.
    """
    todo: deque[Any] = deque([tensor.grad_fn] if tensor.grad_fn is not None else [])
    seen: set[Any] = set()
    found: list[Spec] = []
    while todo and len(seen) < MAX_NODES:
        node = todo.popleft()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == TO_LOCAL:
            spec = getattr(node, "dtensor_spec", None)
            place = None if spec is None else spec_of(spec)
            found += [] if place is None else [place]
        else:
            todo.extend(below for below, _ in node.next_functions if below is not None)
    return found


def laid_out_as(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the DTensor whose local part on each rank is ``local``, placed as another is."""
    from torch.distributed.tensor import DTensor

    like: Any = tensor
    made: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
