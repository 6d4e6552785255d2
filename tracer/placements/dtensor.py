"""Takes DTensors apart: this rank's local tensor, and where it lies in the global one."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.types import Mesh, Placement, Shard

PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Spec:
    """Where this rank's part of a DTensor lies; ``roots`` are bigger meshes that its mesh is part of."""

    mesh_name: str
    mesh: Mesh
    coordinate: tuple[int, ...]
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]
    roots: tuple[Mesh, ...] = ()

    def shard(self) -> Shard:
        """Return the same as a trace states it."""
        return Shard(
            mesh=self.mesh_name,
            coordinate=self.coordinate,
            placements=self.placements,
            global_shape=self.global_shape,
        )

    @property
    def replicated(self) -> bool:
        """Tell whether every rank of the mesh has the whole tensor."""
        return all(placement.kind == "replicate" for placement in self.placements)


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of a DeviceMesh."""

    name: str
    mesh: Mesh
    coordinate: tuple[int, ...] | None
    roots: tuple[Mesh, ...]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def in_use() -> bool:
    """Tell whether the program may have DTensors: whether it has imported them and has ranks.

    Torch imports them itself for every optimizer; without a process group there is no mesh to lie on.
    """
    return "torch.distributed.tensor" in sys.modules and dist.is_available() and dist.is_initialized()


def is_dtensor(tensor: object) -> bool:
    """Tell whether the tensor is a DTensor; a program that never imported them has none."""
    if type(tensor) in PLAIN:
        return False
    dtensor = _class("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(tensor, dtensor)


def split(tensor: torch.Tensor) -> tuple[torch.Tensor, Spec | None]:
    """Return this rank's local part and its place; any other tensor as it is, and None.

    Runs no collective. A part that a collective is still writing to is waited for; the DTensor, and the
    AsyncCollectiveTensor that stands for the part, are left as they were.
    """
    if type(tensor) in PLAIN:
        return tensor, None
    if not is_dtensor(tensor):
        return _arrived(tensor), None
    with unobserved():
        owner: Any = tensor
        local, spec = _arrived(owner._local_tensor), spec_of(owner._spec)
        if spec is None:
            return local, None
        for placement in owner._spec.placements:
            local, known = _masked(local, placement)
            spec = spec if known else None
        return local, spec


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor without waiting for it; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    part: Any = tensor
    local: torch.Tensor = part._local_tensor
    return local


def spec_of(spec: Any, placements: Any = None) -> Spec | None:
    """Return a DTensorSpec as a record, with other placements if given; None outside of its mesh."""
    known = _mesh(spec.mesh)
    if known.coordinate is None or spec.tensor_meta is None:
        return None
    return Spec(
        mesh_name=known.name,
        mesh=known.mesh,
        coordinate=known.coordinate,
        placements=tuple(map(_placement, spec.placements if placements is None else placements)),
        global_shape=tuple(spec.tensor_meta.shape),
        roots=known.roots,
    )


def spec_from_local(tensor: torch.Tensor, device_mesh: Any, placements: Any) -> Spec | None:
    """Return where a plain tensor lies that ``DTensor.from_local`` is given with these placements.

    A single placement is that of the only axis. Parts are taken to be of equal size, as torch does.
    """
    if is_dtensor(tensor):
        return None
    known = _mesh(device_mesh)
    several = placements if isinstance(placements, (list, tuple)) else (placements,)
    if known.coordinate is None or len(several) != len(known.mesh.shape):
        return None
    whole, counted = list(tensor.shape), []
    for placement, size in zip(map(_placement, several), known.mesh.shape, strict=True):
        if placement.dim is not None:
            dim = placement.dim % max(tensor.dim(), 1)
            whole[dim] *= size
            placement = Placement(placement.kind, dim, placement.split_factor)
        counted.append(placement)
    return Spec(known.name, known.mesh, known.coordinate, tuple(counted), tuple(whole), known.roots)


def mesh_of(device_mesh: Any) -> tuple[str, Mesh, tuple[int, ...] | None, tuple[Mesh, ...]]:
    """Return a DeviceMesh's name in the trace, its record, this rank's coordinate and the bigger meshes."""
    known = _mesh(device_mesh)
    return known.name, known.mesh, known.coordinate, known.roots


def _mesh(device_mesh: Any) -> _Known:
    known = _known.get(device_mesh)
    if known is None:
        with unobserved():
            mesh = _read(device_mesh)
            root = getattr(device_mesh, "_get_root_mesh", lambda: device_mesh)()
            roots = () if root is device_mesh else (_read(root),)
        coordinate = meshes.coordinate(mesh, dist.get_rank())
        known = _Known(meshes.name(mesh, dist.get_world_size()), mesh, coordinate, roots)
        _known[device_mesh] = known
    return known


def _read(device_mesh: Any) -> Mesh:
    grid: torch.Tensor = device_mesh.mesh
    names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(grid.dim()))
    return Mesh(axes=tuple(names), shape=tuple(grid.shape), ranks=tuple(grid.flatten().tolist()))


def _placement(placement: Any) -> Placement:
    if getattr(placement, "split_factor", None) is not None:
        return Placement(kind="strided_shard", dim=placement.dim, split_factor=placement.split_factor)
    if placement.is_shard():
        return Placement(kind="shard", dim=placement.dim)
    if placement.is_replicate():
        return Placement(kind="replicate")
    power = getattr(placement, "norm_type", None)
    op = placement.reduce_op if power is None else _op_of_norms(float(power))
    return Placement(kind="partial", op=op)


def _op_of_norms(power: float) -> str:
    """Return how parts' norms combine: ``norm2`` is the root of the sum of squares."""
    return {float("inf"): "max", float("-inf"): "min", 0.0: "sum", 1.0: "sum"}.get(power, f"norm{power:g}")


def _masked(local: torch.Tensor, placement: Any) -> tuple[torch.Tensor, bool]:
    """Return the part without the rows that aren't this rank's, as a sharded embedding has them.

    The rows are marked in a buffer and only zeroed by the reduction; without it nobody can tell.
    """
    buffer = getattr(placement, "mask_buffer", None)
    if buffer is None:
        return local, True
    mask = buffer.data
    if mask is None:
        return local, False
    while mask.dim() < local.dim():
        mask = mask.unsqueeze(-1)
    return local.detach().masked_fill(mask, 0), True


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an AsyncCollectiveTensor stands for, complete; any other tensor as it is."""
    pending = _class("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is None or not isinstance(tensor, pending):
        return tensor
    stand_in: Any = tensor
    elem: torch.Tensor = stand_in.elem
    if not stand_in.completed:
        with unobserved():
            torch.ops._c10d_functional.wait_tensor(elem.detach())
    return elem


def _class(module: str, name: str) -> type | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
