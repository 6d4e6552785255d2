"""Spread the ranks of a simulated program over further ranks that share its samples, as TP, PP or FSDP would.

The arithmetic stays that of the data-parallel program; only who holds which part of a tensor changes. So
what a diff must put together again is known exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensortrace.tracer.types import Kind, Mesh, Placement, Shard
from tests.simulated import CLIP, At, Program
from tests.synthetic import Tensor, write_trace


class Held(NamedTuple):
    """How the inner ranks hold a tensor.

    ``copy``; ``shard`` of a dimension in chunks; ``partial``, summands; ``stage``: only the inner rank
    ``dim`` has it; ``data_shard``, over the data axis. ``declared`` tells whether a shard is recorded.
    """

    how: str
    dim: int = 0
    declared: bool = True


COPY = Held("copy")
PLAIN = Held("copy", declared=False)
Split = Callable[[At], Held]


@dataclass
class Resharded:
    """A program whose rank r becomes the ranks r * inner … of a mesh (dp, tp)."""

    program: Program
    inner: int
    split: Split
    axis: str = "tp"
    edit: Callable[[At, int, np.ndarray], np.ndarray | None] = lambda at, inner, value: value
    """What a mistaken inner rank records in the place of its part; None for nothing."""

    def write(self, root: Path, **fields: Any) -> Path:
        """Write the trace of all ranks."""
        self.program.run()
        outer = self.program.setup.ranks
        ranks = tuple(range(outer * self.inner))
        meshes = {"world": Mesh(("dp", self.axis), (outer, self.inner), ranks)}
        if self.axis == "pp":
            meshes |= {
                f"pp.{r}": Mesh(("pp",), (self.inner,), ranks[r * self.inner : (r + 1) * self.inner])
                for r in range(outer)
            }
        records = [
            self._rank(records, rank, inner)
            for rank, records in enumerate(self.program.records)
            for inner in range(self.inner)
        ]
        absent = {} if outer > 1 else {"reduced_grad": "no reduction across ranks was seen"}
        absent["unscaled_grad"] = "no GradScaler was used"
        return write_trace(root, records, **({"meshes": meshes, "absent": absent} | fields))

    def _rank(self, records: Sequence[Tensor], rank: int, inner: int) -> list[Tensor]:
        new: dict[int, int] = {}
        found: list[Tensor] = []
        for event, (fields, value) in enumerate(records):
            at = At(
                fields["step"], rank, fields["microbatch"], fields["kind"], fields["name"], fields["slot"]
            )
            own = self._own(at, dict(fields), np.asarray(value), rank, inner)
            part = None if own is None else self.edit(at, inner, own[1])
            if own is not None and part is not None:
                own[0]["producers"] = tuple(new[p] for p in fields["producers"] if p in new)
                new[event] = len(found)
                found.append((own[0], part))
        return found

    def _own(self, at: At, fields: dict[str, Any], value: np.ndarray, rank: int, inner: int) -> Tensor | None:
        held = self.split(at)
        outer_placement = fields["shard"].placements[0] if fields.get("shard") else _outer(at)
        fields["shard"] = None
        shape = value.shape
        if held.how == "stage" and inner != held.dim:
            return None
        if held.how == "shard":
            value, placement = _chunk(value, held.dim, self.inner, inner), Placement("shard", dim=held.dim)
        elif held.how == "data_shard":
            outer_placement = Placement("shard", dim=held.dim)
            value, placement = (
                _chunk(value, held.dim, self.program.setup.ranks, rank), Placement("replicate"),
            )  # fmt: skip
        elif held.how == "partial":
            value, placement = _summand(value, self.inner, inner), Placement("partial", op="sum")
        else:
            placement = Placement("replicate")
        if held.declared and outer_placement is not None:
            fields["shard"] = Shard("world", (rank, inner), (outer_placement, placement), shape)
        return fields, value


def _outer(at: At) -> Placement | None:
    """Return how one data rank holds what the program recorded without a shard."""
    if at.kind in (Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOSS):
        return Placement("data")
    return None if at.kind in (Kind.SCHEDULE, Kind.RNG) or at.name == CLIP else Placement("replicate")


def _chunk(value: np.ndarray, dim: int, count: int, index: int) -> np.ndarray:
    """Return one of DTensor's chunks: ceil(n / count) long, the last ones shorter or empty."""
    size = -(-value.shape[dim] // count)
    return np.take(
        value, range(min(index * size, value.shape[dim]), min((index + 1) * size, value.shape[dim])), dim
    )


def _summand(value: np.ndarray, count: int, index: int) -> np.ndarray:
    """Return one of ``count`` summands that add up exactly: each element stands in one of them."""
    owner = np.random.default_rng(5).integers(count, size=value.shape)
    return np.where(owner == index, value, 0).astype(value.dtype)
