"""The layout of DistributedDataParallel: parameters are replicas, samples are a rank's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.placements.base import OF_SAMPLES
from tensortrace.tracer.types import Kind, Mesh, Placement, Shard

AXIS = "dp"
OF_PARAMETERS = frozenset(
    {
        Kind.REDUCED_GRAD,
        Kind.UNSCALED_GRAD,
        Kind.CLIPPED_GRAD,
        Kind.OPTIMIZER_STATE,
        Kind.PARAM,
        Kind.BUFFER,
    }
)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """One mesh of one axis over which gradients are averaged."""

    mesh_name: str
    mesh: Mesh
    coordinate: tuple[int, ...]
    op: str = "ddp"

    def shard(self, kind: Kind, slot: str, global_shape: tuple[int, ...]) -> Shard | None:
        """Return the shard of a tensor; no shard for what data parallelism says nothing about."""
        if kind in OF_SAMPLES:
            return self._placed(Placement(kind="data"), None)
        if kind in OF_PARAMETERS:
            return self._placed(Placement(kind="replicate"), global_shape)
        if kind is Kind.LOCAL_GRAD and slot != "start":
            return self._placed(Placement(kind="partial", op="sum"), global_shape)
        return None

    def _placed(self, placement: Placement, global_shape: tuple[int, ...] | None) -> Shard:
        return Shard(
            mesh=self.mesh_name,
            coordinate=self.coordinate,
            placements=(placement,),
            global_shape=global_shape,
        )


class DDP:
    """Recognises torch's DistributedDataParallel."""

    child = "module"

    def matches(self, module: nn.Module) -> bool:
        """Tell whether the module is a DistributedDataParallel."""
        return isinstance(module, DistributedDataParallel)

    def own_class(self, module: nn.Module) -> type:
        """Return the wrapper's class."""
        return type(module)

    def members(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield every parameter and buffer inside."""
        yield from module.parameters()
        yield from module.buffers()

    def stand_ins(self, module: nn.Module) -> tuple[()]:
        """Return nothing: forward uses the parameters themselves."""
        return ()

    def layout(self, module: nn.Module) -> DataParallel:
        """Return the layout over the wrapper's process group; its first group is mesh ``ddp``."""
        assert isinstance(module, DistributedDataParallel)
        ranks = tuple(dist.get_process_group_ranks(module.process_group))
        mesh = meshes.line(AXIS, ranks)
        coordinate = meshes.coordinate(mesh, dist.get_rank())
        assert coordinate is not None
        whole = len(ranks) == dist.get_world_size()
        name = "ddp" if whole else "ddp." + "_".join(map(str, ranks))
        return DataParallel(mesh_name=name, mesh=mesh, coordinate=coordinate)

    def reduces_backward(self, module: nn.Module) -> bool:
        """Tell whether this forward prepares a reduction: not under ``no_sync``, not without grad."""
        assert isinstance(module, DistributedDataParallel)
        return bool(torch.is_grad_enabled() and module.require_backward_grad_sync)

    def reduced_parameters(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the trainable parameters that the wrapper wasn't told to ignore."""
        assert isinstance(module, DistributedDataParallel)
        ignored = module.parameters_to_ignore
        return [
            parameter
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
