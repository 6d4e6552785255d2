"""Puts other values into a live tensor, and other tensors into the arguments or the result of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.walk import MAX_DEPTH
from tensortrace.tracer.placements import is_dtensor, split

OVERLAPS = 1
"""What torch says of a tensor whose elements share memory."""


def same(local: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether two local tensors of one shape and dtype hold the same bytes."""
    mine, other = (_bytes(tensor) for tensor in (local, value.to(local.device)))
    return bool(torch.equal(mine, other))


def write(tensor: torch.Tensor, value: torch.Tensor, kept: frozenset[int]) -> bool:
    """Overwrite the tensor's local part in place and tell whether that could be done.

    All who hold the tensor see it, what autograd saved included, so that whatever is computed of it is
    computed of the recorded value; no version is counted. Memory of ``kept`` storages is left alone.
    """
    local = split(tensor)[0]
    if local.layout is not torch.strided or torch._debug_has_internal_overlap(local) == OVERLAPS:
        return False
    if (tensor.is_leaf and tensor.requires_grad) or storage_of(local) in kept:
        return False
    with torch.no_grad():
        local.detach().data.copy_(value)
    return True


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's memory from that of others, 0 where it has none."""
    try:
        return int(split(tensor)[0].untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of these local values that is laid out as another is; runs no collective."""
    local = split(tensor)[0]
    made = torch.empty_like(local).copy_(value)
    if not is_dtensor(tensor):
        return made
    from torch.distributed.tensor import DTensor

    owner: Any = tensor
    return DTensor.from_local(
        made, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )


class Instead(torch.autograd.Function):
    """Stands for a tensor with other values; backward hands its gradient on.

    ``anchors`` get zeros: so backward goes on behind a graph that the program has cut.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor, *anchors: torch.Tensor) -> torch.Tensor:
        """Return the value; shape, dtype and layout are the tensor's."""
        ctx.anchors = [(anchor.shape, anchor.dtype, anchor.device) for anchor in anchors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient for the tensor, none for the value, zeros for the anchors."""
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.anchors)
        return (gradients[0], None, *zeros)


def instead(tensor: torch.Tensor, value: torch.Tensor, *anchors: torch.Tensor) -> torch.Tensor:
    """Return a tensor of these values in the place of another, behind it and the anchors in the graph."""
    with unobserved():
        return Instead.apply(tensor, value, *anchors)  # type: ignore[no-any-return, no-untyped-call]


def replaced(value: Any, slot: str, found: Mapping[str, torch.Tensor], depth: int = 0) -> Any:
    """Return a container with the tensors in these slots replaced, and all else as it is."""
    if isinstance(value, torch.Tensor):
        return found.get(slot, value)
    if depth >= MAX_DEPTH or not any(key == slot or key.startswith(f"{slot}.") for key in found):
        return value

    def inside(name: object, item: Any) -> Any:
        return replaced(item, f"{slot}.{name}", found, depth + 1)

    return _rebuilt(value, inside)


def _rebuilt(value: Any, inside: Callable[[object, Any], Any]) -> Any:
    if isinstance(value, Mapping):
        made = {name: inside(name, item) for name, item in value.items()}
        if type(value) is dict:
            return made
        for name, item in made.items():  # a ModelOutput and its like keep what else they hold
            if item is not value[name]:
                value[name] = item  # type: ignore[index]
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inside(n, i) for n, i in zip(value._fields, value, strict=False)))
    if isinstance(value, (list, tuple)):
        return type(value)(inside(number, item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: inside(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
