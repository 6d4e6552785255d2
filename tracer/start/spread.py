"""What a layout file says of forwards that a program spread by hand: names, positions of rows, parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tensortrace.tracer.geometry import Region, region
from tensortrace.tracer.mesh import coordinate
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.start.refusal import rank
from tensortrace.tracer.types import ROOT, Kind

Runs = tuple[tuple[int, int], ...]


class Positions(NamedTuple):
    """The global positions of this rank's token ids, and the ranks that hold the same rows' others."""

    runs: Runs
    ranks: tuple[int, ...]


class Spread:
    """Asks the layout file; without one nothing is spread by hand."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def name(self, module: str) -> str:
        """Return what the unpartitioned program calls a module."""
        return (self._layout.canonical(module, rank()) if self._layout else "") or module

    def positions(self, slot: str, shape: tuple[int, ...]) -> Positions | None:
        """Return where token ids of the root module lie, None where their positions aren't spread.

        Raises LayoutFileError where the shape cannot be of the rule.
        """
        part = self._part(ROOT, slot, shape)
        if self._layout is None or part is None or part.shape[1] == part.global_shape[1]:
            return None
        shard = self._layout.views(Kind.ACTIVATION, slot, ROOT, rank(), shape)[0].shard
        axes = [axis for axis, placement in enumerate(shard.placements) if placement.dim == 1]
        mesh, mine = self._layout.mesh, shard.coordinate
        others = [(other, coordinate(mesh, other)) for other in mesh.ranks]
        same = tuple(o for o, at in others if at and _without(at, axes) == _without(mine, axes))
        return Positions(part.dims[1], same)

    def begins(self, module: str, shape: tuple[int, ...]) -> tuple[Runs, ...] | None:
        """Return which part of the whole a tensor is that lies as the input of a module; None if unknown."""
        part = self._part(module, "in.0", shape)
        return None if part is None else part.dims

    def _part(self, module: str, slot: str, shape: tuple[int, ...]) -> Region | None:
        if self._layout is None:
            return None
        views = self._layout.views(Kind.ACTIVATION, slot, module, rank(), shape)
        if len(views) != 1 or not views[0].whole:
            return None
        found = region(views[0].shard, self._layout.mesh, views[0].local_shape)
        return found if math.prod(found.shape) == math.prod(shape) else None

    @cached_property
    def _layout(self) -> RunLayout | None:
        return None if self._path is None else RunLayout.load(Path(self._path))


def _without(at: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [place for axis, place in enumerate(at) if axis not in axes]
