"""Where the parts of parameters that this rank holds lie in the global tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch
from torch.nn.parameter import is_lazy

from tensortrace.tracer.geometry import LayoutError, Region, full_region, region
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import local_part, split
from tensortrace.tracer.rules import RunLayout, portions
from tensortrace.tracer.start.refusal import rank, refuse, world_size
from tensortrace.tracer.types import Kind

_CHUNK = 1 << 20

SPLIT_BY_HAND = ("ColumnParallel", "RowParallel", "VocabParallel")
"""What the classes are called whose plain parameters are parts, in Megatron and in what was made after it."""


class Place(NamedTuple):
    """A plain tensor that is written in place, and the part of the global tensor that it is.

    ``positions`` are the flat local positions of the region's elements, None where these are all in order.
    What is padding is set to zero by the first place of a tensor, which ``clears`` it.
    """

    name: str
    local: torch.Tensor
    region: Region
    positions: torch.Tensor | None = None
    clears: bool = False

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.region.global_shape

    def write(self, pieces: Iterable[torch.Tensor]) -> None:
        """Overwrite the local elements, in order; values are rounded to the tensor's dtype."""
        if self.clears:
            self.local.zero_()
        found = [piece.to(self.local.dtype) for piece in pieces]
        if found and self.positions is None:
            self.local.copy_(torch.cat(found).reshape(self.local.shape))
        elif found and self.positions is not None:
            device = self.local.device
            self.local.put_(self.positions.to(device), torch.cat(found).to(device))


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


class Parts:
    """Finds the places of what this process holds; parts that the program cut by hand as a layout file says.

    Names are those of the unpartitioned program: the file's renames apply to every tensor, its rules to
    those that no wrapper knows the place of.
    """

    def __init__(
        self, session: Session, layout: RunLayout | None = None, *, refuse: Callable[[str], NoReturn] = refuse
    ) -> None:
        """Raise LayoutFileError where the layout is of another number of ranks.

        ``refuse`` is told of what cannot be placed; without it the program ends.
        """
        self.session = session
        self._refuse = refuse
        self._layout = layout
        if layout is not None:
            layout.check_world(world_size())

    def owned(self) -> Iterator[tuple[str, torch.Tensor, tuple[Place, ...]]]:
        """Yield (own name, tensor, places) of each parameter and buffer that this process holds.

        A flat parameter has a place for each parameter in it that this rank holds something of, under that
        one's own name; a tensor that a layout file takes apart one for each part; any other has one.
        """
        session = self.session
        held = list(session.names.owned())
        for module in dict.fromkeys(module for module, _, _ in held):
            session.note_layout(module)
        for flat in session.flats.whole():
            for place in self.of(flat):
                yield place.name.rpartition(".")[2], flat, (place,)
        for module, own, tensor in held:
            is_own = own in module._buffers or isinstance(tensor, torch.nn.Parameter)
            if is_own and not session.flats.holds(tensor):
                found = self.of(tensor)
                if not self._declared(tensor, tensor):
                    self._refuse_split_by_hand(found[0].name, module, tensor)
                yield own, tensor, found

    def of(self, parameter: torch.Tensor, tensor: torch.Tensor | None = None) -> tuple[Place, ...]:
        """Return the places of a parameter, or of a tensor of its optimizer state that lies as it does.

        Refuses where they cannot be known, naming the parameter.
        """
        tensor = parameter if tensor is None else tensor
        if not self.session.flats.holds(parameter):
            name = self.canonical(self.session.names.tensor(parameter).name)
            return self._declared(parameter, tensor) or (self._place(name, tensor, parameter),)
        found = []
        for own in self.session.flats.divide(tensor, Kind.PARAM, "model", parameter):
            assert own.shard is not None
            part = region(own.shard, self.session.meshes[own.shard.mesh], tuple(own.tensor.shape))
            found.append(Place(self.canonical(own.name), own.tensor, part))
        return tuple(found)

    def names(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the other names of a parameter, by which another run may know it."""
        if self.session.names.pieces(parameter) or self.session.flats.holds(parameter):
            return ()
        return tuple(map(self.canonical, self.session.names.tensor(parameter).aliases))

    @property
    def renames(self) -> bool:
        """Whether a layout file renames anything."""
        return self._layout is not None and bool(self._layout.renames)

    def canonical(self, name: str) -> str:
        """Return what the unpartitioned program calls a tensor; its own name where it has no such tensor."""
        return (self._layout.canonical(name, rank()) if self._layout else "") or name

    def _declared(self, parameter: torch.Tensor, tensor: torch.Tensor) -> tuple[Place, ...]:
        """Return the places that the layout file gives a tensor, none where no rule is of it."""
        if self._layout is None or split(parameter)[1] is not None or not _has_memory(parameter):
            return ()
        name, local = self.session.names.tensor(parameter).name, local_part(tensor).detach()
        kind = Kind.PARAM if isinstance(parameter, torch.nn.Parameter) else Kind.BUFFER
        found = []
        for portion in portions(self._layout, name, rank(), tuple(local.shape), kind=kind):
            if portion.summed:
                self._refuse(f"{name} is a sum over ranks, of which no rank's part can be told")
            taken = portion.positions()
            positions = None if taken is None else torch.from_numpy(taken.copy())
            found.append(Place(portion.name, local, portion.region, positions))
        padded = found and sum(place.region.size for place in found) < local.numel()
        return (found[0]._replace(clears=True), *found[1:]) if padded else tuple(found)

    def _refuse_split_by_hand(self, name: str, module: torch.nn.Module, tensor: torch.Tensor) -> None:
        """End the program where a layer says by a mark or its class's name that its ranks hold parts."""
        marked = getattr(tensor, "tensor_model_parallel", False)
        named = any(words in type(module).__name__ for words in SPLIT_BY_HAND) and world_size() > 1
        if (marked or named) and split(tensor)[1] is None:
            self._refuse(
                f"{name} is a part of a bigger tensor whose layout is not known ({type(module).__name__}): "
                "give a rule for it in --layout FILE"
            )

    def _place(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Place:
        if is_lazy(parameter) or parameter.is_meta:
            self._refuse(f"{name} has no memory yet: initialise it before the first forward")
        local = local_part(tensor).detach()
        if local.layout is not torch.strided:
            self._refuse(f"{name} is not a strided tensor ({local.layout})")
        spec = split(parameter)[1]
        if spec is None:
            return Place(name, local, full_region(local.shape))
        if any(placement.kind == "partial" for placement in spec.placements):
            self._refuse(f"{name} is a sum over ranks, of which no rank's part can be told")
        try:
            return Place(name, local, region(spec.shard(), spec.mesh, tuple(local.shape)))
        except LayoutError as error:
            self._refuse(f"{name}: {error}")


def _has_memory(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta and tensor.layout is torch.strided


def _range(start: int, stop: int) -> Iterator[torch.Tensor]:
    for first in range(start, stop, _CHUNK):
        yield torch.arange(first, min(first + _CHUNK, stop), dtype=torch.int64)


def _along(part: Region, dim: int) -> torch.Tensor:
    """Return what the local indices along a dimension add to the flat global index."""
    stride = math.prod(part.global_shape[dim + 1 :])
    return torch.cat([torch.arange(a, b, dtype=torch.int64) for a, b in part.dims[dim]]) * stride
