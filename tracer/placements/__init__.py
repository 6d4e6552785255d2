"""Knows how wrappers lay tensors out over ranks; one file per wrapper, one list of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from tensortrace.tracer.placements.base import OF_SAMPLES, Layout, Wrapper
from tensortrace.tracer.placements.ddp import DDP
from tensortrace.tracer.placements.dtensor import Spec, in_use, is_dtensor, local_part, spec_of, split
from tensortrace.tracer.placements.fsdp import FSDP
from tensortrace.tracer.placements.fully_shard import FullyShard, is_own_input
from tensortrace.tracer.placements.lineage import Place, place_of
from tensortrace.tracer.placements.styles import declared_inputs

WRAPPERS: tuple[Wrapper, ...] = (DDP(), FSDP(), FullyShard())
"""Every wrapper whose layout is known. A new one is a new file and an entry here."""

_kinds: weakref.WeakKeyDictionary[type, Wrapper | None] = weakref.WeakKeyDictionary()

__all__ = [
    "OF_SAMPLES",
    "WRAPPERS",
    "Layout",
    "Place",
    "Spec",
    "Wrapper",
    "declared_inputs",
    "in_use",
    "is_dtensor",
    "is_own_input",
    "local_part",
    "own_class",
    "place_of",
    "spec_of",
    "split",
    "stand_ins",
    "wrapper_of",
]


def wrapper_of(module: nn.Module) -> Wrapper | None:
    """Return the kind of wrapper that a module is, None for any other module.

    Its class tells, once for all: a class is made after those that it derives from.
    """
    kind = type(module)
    try:
        return _kinds[kind]
    except KeyError:
        found = _kinds[kind] = next((wrapper for wrapper in WRAPPERS if wrapper.matches(module)), None)
        return found


def own_class(module: nn.Module) -> type:
    """Return the class that the program gave a module, before a wrapper changed it."""
    wrapper = wrapper_of(module)
    return type(module) if wrapper is None else wrapper.own_class(module)


def stand_ins(root: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tensor, parameter) of each tensor that forward uses in the place of a parameter below a root."""
    for module in root.modules():
        wrapper = wrapper_of(module)
        if wrapper is not None:
            yield from wrapper.stand_ins(module)
