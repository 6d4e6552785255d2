"""Divides what belongs to a flat parameter into what belongs to the parameters that it is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.guard import hide
from tensortrace.tracer.hooks.imports import when_imported
from tensortrace.tracer.hooks.names import Names
from tensortrace.tracer.hooks.patches import Patches
from tensortrace.tracer.placements import fsdp
from tensortrace.tracer.types import Kind, Shard


class Own(NamedTuple):
    """A parameter's own part of a tensor, the parameter's name, and where the part lies."""

    tensor: torch.Tensor
    name: str
    shard: Shard | None


class _Known(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    flat: fsdp.Flat
    number: int | None


def install(patches: Patches) -> None:
    """Hide the collectives by which the wrapper reduces: its gradients are recorded when it has done so."""
    when_imported(patches, fsdp.RUNTIME, lambda module: _hide_reductions(patches, module))


def _hide_reductions(patches: Patches, module: ModuleType) -> None:
    for name in fsdp.REDUCTIONS:
        if hasattr(module, name):
            patches.attribute(module, name, hide(getattr(module, name)))


class Flats:
    """The flat parameters of the wrappers seen so far, and the parameters in them; holds no tensor."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[int, _Known] = {}
        self._inside: dict[int, list[int]] = {}

    def note(self, module: nn.Module) -> None:
        """Note the flat parameters below a wrapper."""
        for tensor, flat, number in fsdp.flats(module):
            if number is None:
                self._inside[id(tensor)] = inside = []
            inside.append(id(tensor))
            self._known[id(tensor)] = _Known(weakref.ref(tensor), flat, number)

    def holds(self, tensor: torch.Tensor | None) -> bool:
        """Tell whether the tensor is a flat parameter or one of those in it."""
        return self._find(tensor) is not None

    def whole(self) -> Iterator[torch.Tensor]:
        """Yield each flat parameter: the leaf at which gradients arrive, whatever an optimizer has."""
        for known in list(self._known.values()):
            tensor = known.tensor()
            if known.number is None and tensor is not None:
                yield tensor

    def inside(self, tensor: torch.Tensor) -> list[int]:
        """Return the ``id`` of a flat parameter and of each parameter object in it, none for any other."""
        return self._inside[id(tensor)] if self.holds(tensor) and id(tensor) in self._inside else []

    def divide(self, tensor: torch.Tensor, kind: Kind, slot: str, parameter: torch.Tensor) -> list[Own]:
        """Return the parts of a tensor that belongs to a flat parameter, or to one in it.

        Of a parameter that this rank holds nothing of there is none.
        """
        found = self._find(parameter)
        flat = found.flat.parameter() if found is not None else None
        if found is None or flat is None:
            return []
        names = self._names.pieces(flat)
        with unobserved():
            parts = found.flat.parts(kind, slot, tensor, found.number)
            return [Own(part.tensor, names[part.number], part.shard) for part in parts]

    def names(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Return the names of parameters, of a flat one the names of those in it."""
        found: list[str] = []
        for parameter in parameters:
            found += self._names.pieces(parameter) or [self._names.tensor(parameter).name]
        return found

    def _find(self, tensor: torch.Tensor | None) -> _Known | None:
        found = self._known.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None
