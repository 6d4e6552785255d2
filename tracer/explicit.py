"""Lets a program name tensors that no module call shows: ``scores = boundary("scores", scores)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from tensortrace.tracer.types import Mesh, Shard

T = TypeVar("T")


class Receiver(Protocol):
    """What a recording does with a tensor that the program names; never raises."""

    def __call__(self, name: str, tensor: object, layout: str | Shard | None, mesh: Mesh | None) -> object:
        """Record it."""


receivers: list[Receiver] = []
"""The recording of this process, if there is one; put there and taken out by its hooks."""


def boundary(name: str, tensor: T, *, layout: str | Shard | None = None, mesh: Mesh | None = None) -> T:
    """Record a tensor and its gradient under this name, and return the tensor itself.

    Nothing happens while nothing records; a tensor inside a compiled graph is not seen. The boundary is of
    kind ``activation``, slot ``out``, named ``MODULE.name`` after the module whose forward is running.
    ``layout`` says how the tensor lies over ranks where nothing else does: a Shard, whose mesh must be known
    or given as ``mesh``, or a text as in layout files, which is kept for the reader.
    """
    for receive in receivers:
        receive(name, tensor, layout, mesh)
    return tensor
