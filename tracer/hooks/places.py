"""Knows where the plain tensors of module calls lie, in a program that has DTensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tensortrace.tracer.placements import Place, Spec, declared_inputs, in_use, is_dtensor, place_of

Given = list[tuple[str, torch.Tensor]]


class Places:
    """What the autograd graph or a parallel style tells; without a graph, what was told in training."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[tuple[int, ...], Place]] = {}

    def of_inputs(self, module: nn.Module, name: str, given: Given) -> dict[str, Place]:
        """Return the places of a module's inputs by slot; the graph is asked before the style."""
        if not in_use():
            return {}
        declared = declared_inputs(module, given) if module._forward_pre_hooks else {}
        found = {slot: self._place(tensor, name, slot, declared.get(slot)) for slot, tensor in given}
        return {slot: place for slot, place in found.items() if place is not None}

    def of_output(self, tensor: torch.Tensor, name: str, slot: str) -> Place | None:
        """Return the place of a tensor that a module returned."""
        return self._place(tensor, name, slot, None) if in_use() else None

    def _place(self, tensor: torch.Tensor, name: str, slot: str, declared: Place | None) -> Place | None:
        if is_dtensor(tensor):
            return None  # it has its own
        place = place_of(tensor) or declared
        if place is not None:
            self._known[name, slot] = tuple(tensor.shape), place
        elif tensor.grad_fn is None and tensor.is_floating_point():
            place = self._recalled(tensor, name, slot)
        return place

    def _recalled(self, tensor: torch.Tensor, name: str, slot: str) -> Place | None:
        """Return the place that this boundary had, for as many rows as it has now, where that can be."""
        shape, place = self._known.get((name, slot), ((), None))
        if place is None or len(shape) != tensor.dim():
            return None
        whole = list(tensor.shape)
        for dim in {placement.dim for placement in place.own.placements if placement.dim is not None}:
            if tensor.shape[dim] != shape[dim]:
                return None
            whole[dim] = place.own.global_shape[dim]
        return Place(_shaped(place.own, whole), _shaped(place.gradient, whole))


def _shaped(spec: Spec, shape: list[int]) -> Spec:
    return replace(spec, global_shape=tuple(shape))
