"""Knows torch.distributed.pipelining: which modules are stages, and which methods run a chunk of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.types import Mesh

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

AXIS = "pp"
SCHEDULES = "torch.distributed.pipelining.schedules"
STAGES = "torch.distributed.pipelining.stage"

FORWARD, BACKWARD, BACKWARD_WEIGHT = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"
REDUCE, SCALE = "perform_reduce_grad", "scale_grads"
"""The methods that reduce over replicas of a stage, where its backwards don't, and then divide."""

CHUNKS = (FORWARD, BACKWARD, BACKWARD_WEIGHT)
"""The methods of a stage that run one chunk; their first argument is its number."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A module that is stage ``number`` of ``count``; ``ranks`` (global) run the pipeline."""

    module: nn.Module
    number: int
    count: int
    ranks: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        """Tell whether it is given what the whole model is given."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Tell whether it returns what the whole model returns."""
        return self.number == self.count - 1

    def mesh(self) -> tuple[str, Mesh]:
        """Return the pipeline's mesh and its key: ``pp``, with its ranks where others are outside."""
        whole = len(self.ranks) == dist.get_world_size()
        name = AXIS if whole else f"{AXIS}." + "_".join(map(str, self.ranks))
        return name, meshes.line(AXIS, self.ranks)


def schedule_classes(module: ModuleType) -> list[type]:
    """Return the classes whose ``step`` runs a schedule."""
    found = (getattr(module, name, None) for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"))
    return [owner for owner in found if isinstance(owner, type) and "step" in vars(owner)]


def rehearsals(schedule: type) -> list[str]:
    """Return the methods in which a schedule runs its stages to learn shapes only."""
    return [name for name in ("_initialize_stage", "_initialize_stages") if name in vars(schedule)]


def stage_class(module: ModuleType) -> type | None:
    """Return the class that all stages are of, None in a torch that has none we know."""
    found = getattr(module, "_PipelineStageBase", None)
    known = isinstance(found, type) and all(name in vars(found) for name in CHUNKS)
    return found if known else None


def stages(schedule: object) -> list[Stage]:
    """Return the stages that a schedule runs on this rank."""
    one, several = getattr(schedule, "_stage", None), getattr(schedule, "_stages", ())
    return [found for held in (one, *several) if (found := stage(held)) is not None]


def stage(held: object) -> Stage | None:
    """Describe a stage object of torch's."""
    module, number = getattr(held, "submod", None), getattr(held, "stage_index", None)
    count, group = getattr(held, "num_stages", None), getattr(held, "group", None)
    if not isinstance(module, nn.Module) or not isinstance(number, int) or not isinstance(count, int):
        return None
    ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
    return Stage(module, number, count, tuple(ranks))


def trains(schedule: object) -> bool:
    """Tell whether a schedule's run, now, has backwards."""
    return bool(torch.is_grad_enabled() and getattr(schedule, "_has_backward", True))


def chunk(args: tuple[object, ...], kwargs: Mapping[str, object]) -> int | None:
    """Return the chunk's number from the arguments of one of ``CHUNKS`` (without the stage)."""
    given = (
        args[0] if args else next((kwargs[n] for n in ("fwd_chunk_id", "bwd_chunk_id") if n in kwargs), None)
    )
    return given if isinstance(given, int) else None


def is_last_backward(args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Tell, from the arguments of ``backward_one_chunk``, whether data parallelism reduces in this one."""
    return bool(args[3] if len(args) > 3 else kwargs.get("last_backward", False))


def only_weights(held: object) -> bool:
    """Tell whether ``backward_weight_one_chunk`` of this stage follows a backward of the same chunk.

    The first stage has none: all its gradients come from there.
    """
    return getattr(held, "stage_index", 0) != 0


def store() -> Store | None:
    """Return the store that the ranks found each other through, None in a torch that hides it."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    found = getattr(dist.distributed_c10d, "_get_default_store", None)
    if found is None:
        return None
    shared: Store = found()
    return shared
