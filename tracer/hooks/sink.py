"""What a hook may ask of the recorder: the seam between the sources of tensors and their storage."""

from __future__ import annotations

from typing import Protocol

import torch

from tensortrace.tracer.types import Kind, Mesh, Meta, Module, Shard


class Sink(Protocol):
    """Takes tensors from hooks, on the training's own threads (forward, autograd, optimizer).

    Implementations copy the tensor before they return, never block longer than their ``--on-pressure``
    policy says, and are safe to call from several threads.
    """

    @property
    def active(self) -> bool:
        """Tell whether this rank still records; hooks return at once when it is False."""

    def wants(self, kind: Kind, name: str, *, step: int) -> bool:
        """Tell whether the selection includes this boundary, so that hooks can skip work."""

    def wants_step(self, step: int) -> bool:
        """Tell whether the selection includes any boundary of this step."""

    def emit(
        self,
        tensor: torch.Tensor,
        *,
        step: int,
        microbatch: int | None,
        kind: Kind,
        name: str,
        slot: str,
        call: int = 0,
        recompute: bool = False,
        shard: Shard | None = None,
        producers: tuple[int, ...] = (),
        meta: Meta | None = None,
    ) -> int | None:
        """Copy the tensor, queue it and return its event number; None where it was not recorded."""

    def step_began(self, step: int) -> None:
        """Note that a window opened (progress line, sealing of segments)."""

    def mesh(self, name: str, mesh: Mesh) -> None:
        """Note a mesh that shards refer to; it must come before the first boundary that does."""

    def module(self, name: str, module: Module) -> None:
        """Note what is known of a module; what was noted of the name before no longer holds."""

    def absent(self, kind: Kind, reason: str | None) -> None:
        """Declare that this run has no such rung; a reason of None takes the declaration back."""

    def fail(self, where: str, error: BaseException) -> None:
        """Stand down: say once why, close what there is, record nothing more. Never raises."""
