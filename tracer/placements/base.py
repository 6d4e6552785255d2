"""What the recorder asks of a wrapper that spreads a model over ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tensortrace.tracer.types import Kind, Mesh, Shard


class Layout(Protocol):
    """How one wrapped module's tensors lie over a mesh; holds no tensor and no module."""

    @property
    def mesh_name(self) -> str:
        """The key of the mesh in ``RankManifest.meshes``."""

    @property
    def mesh(self) -> Mesh:
        """The mesh itself."""

    @property
    def op(self) -> str:
        """The name of the reduction, as ``meta.op`` of ``reduced_grad`` states it."""

    def shard(self, kind: Kind, slot: str, global_shape: tuple[int, ...]) -> Shard | None:
        """Return the shard of a tensor that belongs to a parameter, buffer or sample."""


class Wrapper(Protocol):
    """A kind of wrapper; stateless."""

    @property
    def child(self) -> str:
        """The attribute under which the wrapper holds the module it wraps."""

    def matches(self, module: nn.Module) -> bool:
        """Tell whether the module is a wrapper of this kind."""

    def layout(self, module: nn.Module) -> Layout:
        """Return the layout of a wrapper of this kind; collective-free."""

    def reduces_backward(self, module: nn.Module) -> bool:
        """Tell, during a forward, whether the backward that follows will reduce gradients."""

    def reduced_parameters(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the parameters whose gradients the wrapper reduces."""
