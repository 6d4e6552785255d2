"""Which grid the ranks of a run stand in, from what each of them holds."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensortrace.tracer.errors import BadRequest

STAGE, DATA, PART = "pp", "dp", "tp"
"""The axes that inference can find: other layers, the same parameters again, other parts of them."""


CONTEXT = "cp"
"""What the axis of parts is called where its ranks hold equal parameters and parts of one sequence."""


SHARDED = "fsdp"
"""What the axis of parts is called where it carries data, beside another that does."""


@dataclass(frozen=True)
class RankGrid:
    """The axes in order with their sizes, and each rank's coordinate."""

    axes: dict[str, int]
    where: dict[int, dict[str, int]]

    def line(self, axis: str, **fixed: int) -> list[int]:
        """Return the ranks along an axis, in order, whose other coordinates are ``fixed`` (0 if left out)."""
        others = {a: fixed.get(a, 0) for a in (STAGE, DATA, PART) if a != axis}
        found = [r for r, at in self.where.items() if all(at[a] == n for a, n in others.items())]
        return sorted(found, key=lambda r: self.where[r][axis])


def find_grid(layers: Mapping[int, frozenset[str]], parts: Mapping[int, tuple[int, ...]]) -> RankGrid:
    """Return the grid of ranks that hold ``layers`` (whole names) and, of these, the ``parts``.

    Ranks of equal layers are a stage, of equal layers and parts data parallel. Raises BadRequest where that
    makes no grid in the order of the ranks.
    """
    stages = _numbered([layers[r] for r in sorted(layers)])
    stage = {r: stages[layers[r]] for r in layers}
    part: dict[int, int] = {}
    for number in set(stage.values()):
        own = sorted(r for r in layers if stage[r] == number)
        numbers = {key: i for i, key in enumerate(sorted({parts[r] for r in own}))}
        part |= {r: numbers[parts[r]] for r in own}
    seen: dict[tuple[int, int], int] = defaultdict(int)
    where = {}
    for rank in sorted(layers):
        key = (stage[rank], part[rank])
        where[rank] = {STAGE: key[0], DATA: seen[key], PART: key[1]}
        seen[key] += 1
    sizes = {axis: 1 + max(at[axis] for at in where.values()) for axis in (STAGE, DATA, PART)}
    for order in itertools.permutations((STAGE, DATA, PART)):
        if _in_order(order, sizes, where):
            return RankGrid({axis: sizes[axis] for axis in order if sizes[axis] > 1}, where)
    raise BadRequest(
        "the ranks of b make no grid",
        found="; ".join(f"rank {r}: {at}" for r, at in where.items()),
        expected="stages, parts and copies in row-major order", remedy="write the layout file by hand",
    )  # fmt: skip


def split_data(grid: RankGrid, size: int) -> RankGrid:
    """Return the grid whose copies are, ``size`` beside each other, parts."""
    axes: dict[str, int] = {}
    for axis, count in grid.axes.items():
        sizes = {DATA: count // size, PART: size} if axis == DATA else {axis: count}
        axes |= {name: n for name, n in sizes.items() if n > 1}
    where = {r: at | {DATA: at[DATA] // size, PART: at[DATA] % size} for r, at in grid.where.items()}
    return RankGrid(axes, where)


def _in_order(order: Sequence[str], sizes: Mapping[str, int], where: Mapping[int, Mapping[str, int]]) -> bool:
    if math.prod(sizes.values()) != len(where):
        return False
    for rank, at in where.items():
        number = 0
        for axis in order:
            number = number * sizes[axis] + at[axis]
        if number != rank:
            return False
    return True


def _numbered(keys: Sequence[frozenset[str]]) -> dict[frozenset[str], int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}
