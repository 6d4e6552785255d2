"""The layout of fully_shard (FSDP2) and of replicate: parameters are DTensors, samples are a rank's own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensortrace.tracer.placements.base import OF_SAMPLES
from tensortrace.tracer.placements.dtensor import mesh_of
from tensortrace.tracer.types import Kind, Mesh, Placement, Shard

NEEDED = ("mesh_info", "fsdp_params", "reduce_grads")
"""What a group of torch's must have to be recognised."""


WRAPS_INPUTS = "RegisterPostBackwardFunctionBackward"
"""The node that torch puts before the inputs of a group's module: what is behind it is the module's alone."""


def is_own_input(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is one module's own stand-in for what others may have been given too."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == WRAPS_INPUTS


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The axes of a mesh over which gradients are averaged; one, or two where shards are replicated."""

    mesh_name: str
    mesh: Mesh
    coordinate: tuple[int, ...]
    op: str = "fully_shard"

    def shard(self, kind: Kind, slot: str, global_shape: tuple[int, ...]) -> Shard | None:
        """Return the shard of a tensor that is no DTensor over these axes."""
        if kind in OF_SAMPLES:
            return self._placed(Placement(kind="data"), None)
        if kind is Kind.LOCAL_GRAD and slot != "start":
            return self._placed(Placement(kind="partial", op="sum"), global_shape)
        if kind is Kind.OPTIMIZER_STATE:  # a step counter
            return self._placed(Placement(kind="replicate"), global_shape)
        return None

    def _placed(self, placement: Placement, global_shape: tuple[int, ...] | None) -> Shard:
        return Shard(
            mesh=self.mesh_name,
            coordinate=self.coordinate,
            placements=(placement,) * len(self.mesh.axes),
            global_shape=global_shape,
        )


class FullyShard:
    """Recognises modules that ``fully_shard`` was applied to; they keep their place, not their class."""

    child: str | None = None

    def matches(self, module: nn.Module) -> bool:
        """Tell whether ``fully_shard`` was applied to this very module."""
        base = _base()
        return base is not None and isinstance(module, base)

    def own_class(self, module: nn.Module) -> type:
        """Return the class that the module had before."""
        base = _base()
        assert base is not None
        return next(cls for cls in type(module).__mro__ if not issubclass(cls, base))

    def layout(self, module: nn.Module) -> DataAxes | None:
        """Return the layout over the mesh of the module's parameters, or of the first below that has some."""
        for part in module.modules():
            for group in _groups(part) if self.matches(part) else ():
                name, mesh, coordinate, _ = mesh_of(group.mesh_info.mesh)
                return None if coordinate is None else DataAxes(name, mesh, coordinate)
        return None

    def members(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield the sharded parameters that this module's own groups hold."""
        for group in _groups(module):
            for held in group.fsdp_params:
                yield held.sharded_param

    def stand_ins(self, module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, sharded parameter) of the whole parameters and of those that wait for backward."""
        for group in _groups(module):
            for held in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    tensor = getattr(held, name, None)
                    if isinstance(tensor, torch.Tensor):
                        yield tensor, held.sharded_param

    def reduces_backward(self, module: nn.Module) -> bool:
        """Tell whether a backward may follow; whether it reduces may be set until it runs."""
        return torch.is_grad_enabled()

    def reduced_parameters(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the trainable parameters whose gradients were reduced completely, unless told not to."""
        return [
            held.sharded_param
            for group in _groups(module)
            if group.reduce_grads and getattr(group, "all_reduce_grads", True)
            for held in group.fsdp_params
            if held.sharded_param.requires_grad
        ]


def _groups(module: nn.Module) -> Iterable[Any]:
    sharded: Any = module
    state = sharded._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:
        several = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in several if all(hasattr(group, name) for name in NEEDED)]


def _base() -> type | None:
    for module in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
        found = getattr(sys.modules.get(module), "FSDPModule", None)
        if isinstance(found, type):
            return found
    return None
