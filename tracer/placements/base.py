"""What the recorder asks of a wrapper that spreads a model over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from tensortrace.tracer.types import Kind, Mesh, Shard

OF_SAMPLES = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOSS})
"""The kinds whose rows are a data rank's own."""


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
    """A kind of wrapper; stateless. All but ``matches`` are asked of modules that it matches."""

    @property
    def child(self) -> str | None:
        """The attribute under which the wrapper holds the module it wraps; None where it is that module."""

    def matches(self, module: nn.Module) -> bool:
        """Tell by its class alone whether the module is a wrapper of this kind; asked once of a class."""

    def own_class(self, module: nn.Module) -> type:
        """Return the class that the program gave the module, where the wrapper changes it."""

    def layout(self, module: nn.Module) -> Layout | None:
        """Return the layout of a wrapper of this kind, None where this rank has no part; collective-free."""

    def members(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Return the parameters and buffers that the layout covers."""

    def stand_ins(self, module: nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return (tensor, parameter) of each tensor that forward uses in the place of a parameter."""

    def reduces_backward(self, module: nn.Module) -> bool:
        """Tell, during a forward, whether the backward that follows will reduce gradients."""

    def reduced_parameters(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the parameters whose gradients the wrapper reduces."""
