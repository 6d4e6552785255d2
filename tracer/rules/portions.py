"""Which elements of the unpartitioned program a local tensor's elements are, for whoever writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tensortrace.tracer.geometry import Region, region
from tensortrace.tracer.rules.run import RunLayout, View
from tensortrace.tracer.types import Kind


@dataclass(frozen=True)
class Portion:
    """Elements of a local tensor that are elements of one tensor of the unpartitioned program.

    ``name`` is that tensor's, ``region`` what is held of it. ``summed`` tells that the global value is a
    reduction over ranks, so that none of them can be told from it. ``local_shape`` is the local tensor's.
    """

    name: str
    region: Region
    summed: bool
    local_shape: tuple[int, ...]
    view: View

    def positions(self) -> np.ndarray | None:
        """Return the flat local positions (int64) of the region's elements in their order.

        None where these are all of the local tensor in order.
        """
        if self.view.whole:
            return None
        count = math.prod(self.local_shape)
        return self.view.take(np.arange(count, dtype=np.int64).reshape(self.local_shape)).reshape(-1)


def portions(
    layout: RunLayout,
    name: str,
    rank: int,
    local_shape: tuple[int, ...],
    *,
    kind: Kind = Kind.PARAM,
    slot: str = "model",
) -> tuple[Portion, ...]:
    """Return what a local tensor holds of the unpartitioned program's tensors; empty where no rule is of it.

    ``name`` is what the rank calls it. Blocks that ranks share are in the portion of each; what is in none is
    padding. A fused tensor has a portion for each tensor that the unpartitioned program makes of it. Raises
    LayoutFileError where the rank is none of the layout's or the shape cannot be of the rule.
    """
    views = layout.views(kind, slot, name, rank, local_shape, copies="all")
    return tuple(
        Portion(
            view.name,
            region(view.shard, layout.mesh, view.local_shape),
            any(placement.kind == "partial" for placement in view.shard.placements),
            local_shape,
            view,
        )
        for view in views
    )
