"""The layout of FullyShardedDataParallel: parameters are intervals of flat ones, samples a rank's own."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.placements.base import OF_SAMPLES
from tensortrace.tracer.types import Box, Kind, Mesh, Placement, Shard

MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
RUNTIME = "torch.distributed.fsdp._runtime_utils"
REDUCTIONS = ("_reduce_grad", "_reduce_grad_no_shard")
"""Functions in which FSDP calls collectives of its own."""

AXIS, REPLICAS = "dp", "dp_replicate"
FLAT = "_flat_param"
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class Held(NamedTuple):
    """What this rank's shard holds of one parameter: ``numel`` elements from ``start`` in the parameter."""

    offset: int
    start: int
    numel: int


class Piece(NamedTuple):
    """One parameter within a flat one: its shape, where it begins, and this rank's part, None without one."""

    shape: tuple[int, ...]
    begin: int
    numel: int
    held: Held | None
    trains: bool


class Part(NamedTuple):
    """A tensor that belongs to the flat parameter's piece of this number."""

    number: int
    tensor: torch.Tensor
    shard: Shard


@dataclass(frozen=True, slots=True)
class FlatData:
    """The axes over which gradients are averaged; the last is the one that parameters are sharded over."""

    mesh_name: str
    mesh: Mesh
    coordinate: tuple[int, ...]
    op: str = "fsdp"

    def shard(self, kind: Kind, slot: str, global_shape: tuple[int, ...]) -> Shard | None:
        """Return the shard of a sample or a buffer; parameters have a ``Flat``."""
        if kind in OF_SAMPLES:
            return self.placed("data", "data", None)
        return self.placed("replicate", "replicate", global_shape) if kind is Kind.BUFFER else None

    def placed(
        self, others: str, last: str, shape: tuple[int, ...] | None, boxes: tuple[Box, ...] = ()
    ) -> Shard:
        """Return a shard with one kind of placement on the last axis and another on those before."""
        kinds = [others] * (len(self.mesh.axes) - 1) + [last]
        placements = tuple(Placement(kind=k, op="sum" if k == "partial" else None) for k in kinds)  # type: ignore[arg-type]
        return Shard(self.mesh_name, self.coordinate, placements, global_shape=shape, boxes=boxes)


@dataclass(frozen=True, slots=True)
class Flat:
    """How one flat parameter, its gradients and its optimizer state divide into those of its parameters.

    ``sharded`` is False where every rank holds all of it. ``size`` counts the local elements of a shard.
    """

    parameter: weakref.ref[torch.Tensor]
    data: FlatData
    pieces: tuple[Piece, ...]
    sharded: bool
    size: int

    def parts(self, kind: Kind, slot: str, tensor: torch.Tensor, number: int | None) -> Iterator[Part]:
        """Yield the parts of a tensor that belongs to the flat parameter, or to one of its parameters.

        A tensor of the flat parameter is 1-D and either whole or this rank's shard; one of a parameter
        likewise, or has the parameter's shape. What this rank holds nothing of yields nothing.
        """
        chosen = range(len(self.pieces)) if number is None else (number,)
        for index in chosen:
            piece = self.pieces[index]
            if tensor.dim() == 0:  # a step counter
                if piece.held is not None:
                    yield Part(index, tensor, self.data.placed("replicate", "replicate", ()))
            elif kind is Kind.LOCAL_GRAD and slot != "start":
                if piece.trains:
                    whole = self._whole(piece, tensor, number)
                    yield Part(index, whole, self.data.placed("partial", "partial", piece.shape))
            elif not self.sharded:
                whole = self._whole(piece, tensor, number)
                yield Part(index, whole, self.data.placed("replicate", "replicate", piece.shape))
            elif piece.held is not None:
                held = self._held(piece, piece.held, tensor, number)
                box = Box((piece.held.start,), (piece.held.numel,))
                yield Part(index, held, self.data.placed("replicate", "flat", piece.shape, (box,)))

    def _whole(self, piece: Piece, tensor: torch.Tensor, number: int | None) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        own = flat if number is not None else flat[piece.begin : piece.begin + piece.numel]
        return own.view(piece.shape)

    def _held(self, piece: Piece, held: Held, tensor: torch.Tensor, number: int | None) -> torch.Tensor:
        flat = tensor.detach().reshape(-1)
        if number is None:
            offset = held.offset if flat.numel() == self.size else piece.begin + held.start
        else:
            offset = 0 if flat.numel() == held.numel else held.start
        return flat[offset : offset + held.numel]


class FSDP:
    """Recognises torch's FullyShardedDataParallel."""

    child = "_fsdp_wrapped_module"

    def matches(self, module: nn.Module) -> bool:
        """Tell whether the module is a FullyShardedDataParallel."""
        owner = fsdp_class()
        return owner is not None and isinstance(module, owner)

    def own_class(self, module: nn.Module) -> type:
        """Return the wrapper's class."""
        return type(module)

    def members(self, module: nn.Module) -> Iterator[torch.Tensor]:
        """Yield every parameter and buffer inside, those of flat parameters included."""
        yield from module.parameters()
        yield from module.buffers()

    def stand_ins(self, module: nn.Module) -> tuple[()]:
        """Return nothing: a flat parameter stands for several."""
        return ()

    def layout(self, module: nn.Module) -> FlatData:
        """Return the layout over the wrapper's process group, and over its replicas where it has some."""
        state: Any = module
        ranks = tuple(dist.get_process_group_ranks(state.process_group))
        mesh, across = meshes.line(AXIS, ranks), getattr(state, "_inter_node_pg", None)
        if across is not None:
            mesh = _grid(ranks, tuple(dist.get_process_group_ranks(across))) or mesh
        coordinate = meshes.coordinate(mesh, dist.get_rank())
        assert coordinate is not None
        whole = len(mesh.ranks) == dist.get_world_size()
        name = "fsdp" if whole else "fsdp." + "_".join(map(str, mesh.ranks))
        return FlatData(mesh_name=name, mesh=mesh, coordinate=coordinate)

    def reduces_backward(self, module: nn.Module) -> bool:
        """Tell whether this forward prepares a reduction: not under ``no_sync``, not without grad."""
        return bool(torch.is_grad_enabled() and getattr(module, "_sync_gradients", True))

    def reduced_parameters(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the trainable parameters of this unit, as the optimizer has them."""
        handle = _handle(module)
        if handle is None:
            return []
        own = handle.flat_param._params if handle._use_orig_params else None
        return [parameter for parameter in own or [handle.flat_param] if parameter.requires_grad]


def fsdp_class() -> type | None:
    """Return the wrapper's class where the program has imported it."""
    found = getattr(sys.modules.get(MODULE), "FullyShardedDataParallel", None)
    return found if isinstance(found, type) else None


def named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (name below the module, tensor) of a unit's flat parameter and of those that it is made of.

    The module tree doesn't hold them all the time: forward puts views of the flat parameter in their place.
    """
    handle = _handle(module)
    if handle is None:
        return []
    own = handle.flat_param._params or ()
    return [(FLAT, handle.flat_param), *zip(piece_names(handle.flat_param), own, strict=False)]


def piece_names(parameter: torch.Tensor) -> list[str]:
    """Return the names, below its unit, of the parameters that a flat one is made of; none for any other."""
    return [_stripped(name) for name in getattr(parameter, "_fqns", ())]


def flats(module: nn.Module) -> list[tuple[torch.Tensor, Flat, int | None]]:
    """Return (tensor, its flat parameter's division, number of its piece) of all units below a wrapper."""
    found: list[tuple[torch.Tensor, Flat, int | None]] = []
    for unit in module.modules():
        handle = _handle(unit)
        if handle is not None:
            flat = _flat(handle, FSDP().layout(unit))
            found.append((handle.flat_param, flat, None))
            found += [(own, flat, i) for i, own in enumerate(handle.flat_param._params or ())]
    return found


def _handle(module: nn.Module) -> Any:
    """Return the handle of a unit's own flat parameter; None for any other module."""
    return getattr(module, "_handle", None) if FSDP().matches(module) else None


def _flat(handle: Any, data: FlatData) -> Flat:
    parameter, pieces, begin, number = handle.flat_param, [], 0, 0
    for numel, is_padding in zip(parameter._numels_with_padding, parameter._is_padding_mask, strict=True):
        if not is_padding:
            info = parameter._shard_param_infos[number]
            held = (
                Held(info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard)
                if info.in_shard
                else None
            )
            trains = parameter._params is None or parameter._params[number].requires_grad
            pieces.append(Piece(tuple(parameter._shapes[number]), begin, int(numel), held, bool(trains)))
            number += 1
        begin += int(numel)
    return Flat(
        parameter=weakref.ref(parameter),
        data=data,
        pieces=tuple(pieces),
        sharded=bool(handle.uses_sharded_strategy),
        size=int(parameter._sharded_size.numel()),
    )


def _grid(row: tuple[int, ...], column: tuple[int, ...]) -> Mesh | None:
    """Return the grid of ranks whose rows shard and whose columns replicate, if it is the usual one."""
    size, world = len(row), dist.get_world_size()
    me = dist.get_rank()
    usual = row == tuple(range(me // size * size, (me // size + 1) * size))
    if not usual or column != tuple(range(me % size, world, size)):
        return None
    return Mesh(axes=(REPLICAS, AXIS), shape=(len(column), size), ranks=tuple(range(world)))


def _stripped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
