"""Finds the tensors in the arguments and results of a call, with the slot that names each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

MAX_DEPTH = 8


def tensors_of_call(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of a call's arguments: ``in.0``, ``in.0.1``, ``in.kw.NAME``."""
    found = [item for i, value in enumerate(args) for item in _walk(value, f"in.{i}", 0)]
    found += [item for name, value in kwargs.items() for item in _walk(value, f"in.kw.{name}", 0)]
    return found


def tensors_of_result(result: object) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of a call's result: ``out``, or ``out.0``, ``out.NAME`` in a container."""
    return list(_walk(result, "out", 0))


def tensors_in(value: object, slot: str) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of all tensors in ``value``; a bare tensor has the slot itself."""
    return list(_walk(value, slot, 0))


def printable(name: str) -> str:
    """Return a name of the program's as a trace may hold it: what cannot be printed is escaped."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has memory and a version of its own: not functorch's, fake or meta."""
    return not (tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor) or is_lazy(tensor))


def _walk(value: object, slot: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            yield slot, value
    elif depth < MAX_DEPTH:
        for name, item in _children(value):
            yield from _walk(item, f"{slot}.{printable(str(name))}", depth + 1)


def _children(value: object) -> Iterable[tuple[object, object]]:
    """Name the parts of a container; mappings come first because a ModelOutput is a dataclass too."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=False))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return ()
