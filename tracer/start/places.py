"""Where the part of a parameter that this rank holds lies in the global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.start.refusal import refuse
from tensortrace.tracer.start.values import chunks


class Place(NamedTuple):
    """A tensor that is written in place, and the global tensor it is a part of."""

    name: str
    local: torch.Tensor
    global_shape: tuple[int, ...]

    def indices(self) -> Iterator[torch.Tensor]:
        """Yield the flat global index (int64) of each local element, piece by piece, in local order."""
        for start, stop in chunks(0, math.prod(self.global_shape)):
            yield torch.arange(start, stop, dtype=torch.int64)

    def write(self, pieces: Iterator[torch.Tensor]) -> None:
        """Overwrite the local elements, in order, with values that are rounded to the tensor's dtype."""
        flat = torch.cat([piece.to(torch.float32).to(self.local.dtype) for piece in pieces] or [_NOTHING])
        self.local.copy_(flat.reshape(self.local.shape))


_NOTHING = torch.empty(0)


def locate(session: Session, name: str, module: nn.Module, tensor: torch.Tensor) -> Place:
    """Return the place of a parameter or buffer; ends the program where it cannot be known."""
    if is_lazy(tensor) or tensor.is_meta:
        refuse(f"{name} has no memory yet: initialise it before the first forward")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        refuse(f"{name} holds {tensor.dtype} ({tensor.layout}), which has no values to draw")
    if getattr(tensor, "tensor_model_parallel", False):
        refuse(f"{name} is a part of a bigger tensor whose layout is not known: give --layout")
    return Place(name, tensor.detach(), tuple(tensor.shape))
