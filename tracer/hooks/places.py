"""Knows where the plain tensors of module calls lie, in a program that has DTensors."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import nn

from tensortrace.tracer.placements import Place, Spec, declared_inputs, in_use, is_dtensor, place_of

MAX_UNPLACED = 1024
"""How many outputs of unknown place are remembered until a style is seen to take one."""

Given = list[tuple[str, torch.Tensor]]


class Places:
    """What the autograd graph or a parallel style tells; without a graph, what was told in training."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[tuple[int, ...], Place]] = {}
        self._unplaced: dict[int, tuple[weakref.ref[torch.Tensor], tuple[str, str]]] = {}
        self._learned: dict[tuple[str, str], tuple[tuple[int, ...], Place]] = {}
        self._consumed: set[tuple[str, str]] = set()

    def any(self) -> bool:
        """Tell whether the place of any plain tensor was ever known: then later ones are learned from it."""
        return bool(self._known or self._learned)

    def of_inputs(self, module: nn.Module, name: str, given: Given) -> dict[str, Place]:
        """Return the places of a module's inputs by slot; the graph is asked before the style."""
        if not in_use():
            return {}
        declared = declared_inputs(module, given) if module._forward_pre_hooks else {}
        for slot, tensor in given:
            if slot in declared:
                self._note_consumer(tensor, declared[slot])
        found = {slot: self._place(tensor, name, slot, declared.get(slot)) for slot, tensor in given}
        return {slot: place for slot, place in found.items() if place is not None}

    def of_output(self, tensor: torch.Tensor, name: str, slot: str) -> Place | None:
        """Return the place of a tensor that a module returned."""
        if not in_use():
            return None
        place = self._place(tensor, name, slot, None)
        if place is None and not is_dtensor(tensor):
            if len(self._unplaced) >= MAX_UNPLACED:
                self._unplaced.clear()
            self._unplaced[id(tensor)] = weakref.ref(tensor), (name, slot)
        return place

    def _note_consumer(self, tensor: torch.Tensor, place: Place) -> None:
        """Note how an output lies, now that a style that takes it says so."""
        reference, boundary = self._unplaced.get(id(tensor), (None, None))
        is_sharded = any(placement.dim is not None for placement in place.own.placements)
        if is_sharded and boundary is not None and reference is not None and reference() is tensor:
            self._learned[boundary] = tuple(tensor.shape), place

    def backward_ended(self) -> None:
        """Use from here on what was learned: a recomputed output lies as that of its first pass."""
        self._known |= self._learned
        self._consumed |= self._learned.keys()
        self._learned.clear()

    def _place(self, tensor: torch.Tensor, name: str, slot: str, declared: Place | None) -> Place | None:
        if is_dtensor(tensor):
            return None  # it has its own
        place = place_of(tensor) or declared
        if place is not None:
            self._known[name, slot] = tuple(tensor.shape), place
        elif tensor.is_floating_point() and (tensor.grad_fn is None or (name, slot) in self._consumed):
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
