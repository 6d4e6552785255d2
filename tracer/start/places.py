"""Where the part of a parameter that this rank holds lies in the global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from tensortrace.tracer.geometry import LayoutError, Region, full_region, region
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import local_part, split
from tensortrace.tracer.start.refusal import refuse, world_size
from tensortrace.tracer.types import Kind

_CHUNK = 1 << 20

SPLIT_BY_HAND = ("ColumnParallel", "RowParallel", "VocabParallel")
"""What the classes are called whose plain parameters are parts, in Megatron and in what was made after it."""


class Place(NamedTuple):
    """A plain tensor that is written in place, and the part of the global tensor that it is."""

    name: str
    local: torch.Tensor
    region: Region

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.region.global_shape

    def write(self, pieces: Iterable[torch.Tensor]) -> None:
        """Overwrite the local elements, in order; values are rounded to the tensor's dtype."""
        found = [piece.to(self.local.dtype) for piece in pieces]
        if found:
            self.local.copy_(torch.cat(found).reshape(self.local.shape))


def indices(part: Region) -> Iterator[torch.Tensor]:
    """Yield the flat global index (int64) of each local element, in local order, piece by piece."""
    if part.flat:
        for start, stop in part.dims[0]:
            yield from _range(start, stop)
    elif part.whole:
        yield from _range(0, part.size)
    elif part.size:
        inner = torch.zeros(1, dtype=torch.int64)
        for dim in range(len(part.dims) - 1, 0, -1):
            inner = (_along(part, dim)[:, None] + inner).flatten()
        outer = _along(part, 0)
        for rows in torch.split(outer, max(_CHUNK // len(inner), 1)):
            yield (rows[:, None] + inner).flatten()


def owned_parts(session: Session) -> Iterator[tuple[str, torch.Tensor, tuple[Place, ...]]]:
    """Yield (own name, tensor, places) of each parameter and buffer that this process holds.

    A flat parameter has a place for each parameter in it that this rank holds something of, under that
    one's own name; any other tensor has one.
    """
    held = list(session.names.owned())
    for module in dict.fromkeys(module for module, _, _ in held):
        session.note_layout(module)
    for flat in session.flats.whole():
        for place in places(session, "", flat):
            yield place.name.rpartition(".")[2], flat, (place,)
    for module, own, tensor in held:
        is_own = own in module._buffers or isinstance(tensor, torch.nn.Parameter)
        if is_own and not session.flats.holds(tensor):
            name = session.names.tensor(tensor).name
            _refuse_split_by_hand(name, module, tensor)
            yield own, tensor, places(session, name, tensor)


def places(
    session: Session, name: str, parameter: torch.Tensor, tensor: torch.Tensor | None = None
) -> tuple[Place, ...]:
    """Return the places of a parameter, or of a tensor of its optimizer state that lies as it does.

    Ends the program where they cannot be known, naming the parameter.
    """
    tensor = parameter if tensor is None else tensor
    if not session.flats.holds(parameter):
        return (_place(name, tensor, parameter),)
    found = []
    for own in session.flats.divide(tensor, Kind.PARAM, "model", parameter):
        assert own.shard is not None
        part = region(own.shard, session.meshes[own.shard.mesh], tuple(own.tensor.shape))
        found.append(Place(own.name, own.tensor, part))
    return tuple(found)


def _refuse_split_by_hand(name: str, module: torch.nn.Module, tensor: torch.Tensor) -> None:
    """End the program where a layer says by a mark or its class's name that its ranks hold parts."""
    marked = getattr(tensor, "tensor_model_parallel", False)
    named = any(words in type(module).__name__ for words in SPLIT_BY_HAND) and world_size() > 1
    if (marked or named) and split(tensor)[1] is None:
        refuse(f"{name} is a part of a bigger tensor whose layout is not known ({type(module).__name__})")


def _place(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Place:
    if is_lazy(parameter) or parameter.is_meta:
        refuse(f"{name} has no memory yet: initialise it before the first forward")
    local = local_part(tensor).detach()
    if local.layout is not torch.strided:
        refuse(f"{name} is not a strided tensor ({local.layout})")
    spec = split(parameter)[1]
    if spec is None:
        return Place(name, local, full_region(local.shape))
    if any(placement.kind == "partial" for placement in spec.placements):
        refuse(f"{name} is a sum over ranks, of which no rank's part can be told")
    try:
        return Place(name, local, region(spec.shard(), spec.mesh, tuple(local.shape)))
    except LayoutError as error:
        refuse(f"{name}: {error}")


def _range(start: int, stop: int) -> Iterator[torch.Tensor]:
    for first in range(start, stop, _CHUNK):
        yield torch.arange(first, min(first + _CHUNK, stop), dtype=torch.int64)


def _along(part: Region, dim: int) -> torch.Tensor:
    """Return what the local indices along a dimension add to the flat global index."""
    stride = math.prod(part.global_shape[dim + 1 :])
    return torch.cat([torch.arange(a, b, dtype=torch.int64) for a, b in part.dims[dim]]) * stride
