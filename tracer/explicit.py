"""Lets a program name tensors that no module call shows: ``scores = boundary("scores", scores)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from tensortrace.tracer.types import Mesh, Shard

T = TypeVar("T")

STATES = "layout: "
"""How ``meta.text`` begins of a boundary whose layout the program gives as a text."""


class Receiver(Protocol):
    """What a recording does with a tensor that the program names; never raises."""

    def __call__(self, name: str, tensor: object, lies: Lies) -> object:
        """Record it."""


class Lies(NamedTuple):
    """How the program says that a tensor and its gradient lie over the ranks of a mesh."""

    value: str | Shard | None
    grad: str | Shard | None
    mesh: Mesh | None


receivers: list[Receiver] = []
"""The recording of this process, if there is one; put there and taken out by its hooks."""


def boundary(
    name: str,
    tensor: T,
    *,
    layout: str | Shard | None = None,
    grad: str | Shard | None = None,
    mesh: Mesh | None = None,
) -> T:
    """Record a tensor and its gradient under this name, and return the tensor itself.

    Nothing happens while nothing records; a tensor inside a compiled graph is not seen. The boundary is of
    kind ``activation``, slot ``out``, named ``MODULE.name`` after the module whose forward is running.
    ``layout`` says how the tensor lies over ranks, ``grad`` how its gradient does where that differs: a text
    in the terms of layout files (``"b s[cp] h"``), whose axes are those of the run's layout file, of ``mesh``
    or of another mesh that the program uses; or a Shard, whose mesh must be known or given as ``mesh``.
    """
    for receive in receivers:
        receive(name, tensor, Lies(layout, layout if grad is None else grad, mesh))
    return tensor
