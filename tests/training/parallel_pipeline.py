"""Pipelines of two ranks, one or two stages each, and a pipeline of meshes."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from parallel_model import LENGTH, Decoder
from parallel_parts import Layout
from parallel_rows import Batch
from parallel_tensor import parallelize
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B


def cut(model: Decoder, stage: int, stages: int) -> Decoder:
    """Return what one stage keeps: layers under their own numbers, and at the ends embeddings or the head."""
    part = copy.deepcopy(model)
    size = -(-len(model.layers) // stages)
    for number in model.layers:
        if int(number) // size != stage:
            del part.layers[number]
    if stage > 0:
        part.token = part.position = None
    if stage < stages - 1:
        part.norm = part.head = None
    return part


class PP(Layout):
    """1F1B over two microbatches; torch divides gradients by their number, which the objective undoes."""

    stages_per_rank = 1
    microbatches = 2
    divides = True
    microbatched = Schedule1F1B

    def wrap(self, model: Decoder) -> None:
        self.pipe(model, dist.group.WORLD)

    def pipe(self, model: Decoder, group: dist.ProcessGroup) -> None:
        place, size = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        self.count = size * self.stages_per_rank
        self.microbatches = max(self.microbatches, size)
        numbers = range(place, self.count, size)
        self.chunks = {number: cut(model, number, self.count) for number in numbers}
        for chunk in self.chunks.values():
            self.spread(chunk)
        del self.whole, self.model
        self.stages = [
            PipelineStage(chunk, number, self.count, torch.device("cpu"), group=group)
            for number, chunk in self.chunks.items()
        ]
        self.is_first, self.is_last = 0 in self.chunks, self.count - 1 in self.chunks
        self.objective = 0.0
        self.schedule = self.scheduled()

    def spread(self, chunk: Decoder) -> None:
        """Spread one stage over the ranks that hold it."""

    def scheduled(self) -> Schedule1F1B | ScheduleInterleaved1F1B:
        settings = {"loss_fn": self.scaled_loss, "scale_grads": self.divides}
        return self.microbatched(self.stages[0], self.microbatches, **settings)

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.settings.scaler.scale(self.loss(logits, targets) * self.objective)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for chunk in self.chunks.values() for parameter in chunk.parameters()]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.chunks.values():
            yield from chunk.named_parameters()

    def padded(self, batch: Batch) -> Batch:
        return batch.padded(LENGTH - 4)  # a pipeline's shapes are those of its first step

    def backward(self, batch: Batch, total: int) -> Tensor:
        self.objective = self.factor / total * (self.microbatches if self.divides else 1)
        if self.plant == "divided-by-microbatches":
            self.objective /= self.microbatches
        losses: list[Tensor] = []
        given = (batch.tokens,) if self.is_first else ()
        scale = self.settings.scaler.scale(torch.ones(()))  # of which every rank needs one
        with self.settings.forward():
            if self.is_last:
                self.schedule.step(*given, target=batch.targets, losses=losses)
            else:
                self.schedule.step(*given)
        return sum(losses, torch.zeros(())).detach() / self.objective / scale

    def summed(self, loss: Tensor) -> float:
        loss = loss.double()
        dist.all_reduce(loss)
        return float(loss)

    def tied(self) -> nn.Parameter | None:
        """Return this rank's copy of the weight that the first and the last stage share."""
        if not self.options.tied:
            return None
        if self.is_first:
            return self.chunks[0].token.weight
        return self.chunks[self.count - 1].head.weight if self.is_last else None

    def reduce(self) -> None:
        weight = self.tied()
        if weight is not None and self.plant != "tied-not-summed":
            dist.all_reduce(weight.grad, group=self.group)

    def clip(self, max_norm: float) -> None:
        tied = None if self.is_first else self.tied()
        self.clip_together(max_norm, [p for p in self.parameters() if p is not tied], self.group)


class Interleaved(PP):
    """Two stages a rank; the objective says all, gradients are not divided."""

    stages_per_rank = 2
    microbatches = 4
    divides = False

    def scheduled(self) -> ScheduleInterleaved1F1B:
        settings = {"loss_fn": self.scaled_loss, "scale_grads": self.divides}
        return ScheduleInterleaved1F1B(self.stages, self.microbatches, **settings)


class DPTPPP(PP):
    """Two stages, each sharded data parallel over two pairs of ranks that share each tensor."""

    def __init__(self, model: Decoder, options: argparse.Namespace) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        super().__init__(model, options)

    def wrap(self, model: Decoder) -> None:
        data = self.mesh["dp"]
        self.part, self.parts, self.factor = data.get_local_rank(), data.size(), data.size()
        self.pipe(model, self.mesh["pp"].get_group())

    def spread(self, chunk: Decoder) -> None:
        parallelize(chunk, self.mesh["tp"], False, self.plant)
        for layer in chunk.layers.values():
            fully_shard(layer, mesh=self.mesh["dp"], reshard_after_forward=False)
        fully_shard(chunk, mesh=self.mesh["dp"], reshard_after_forward=False)

    def summed(self, loss: Tensor) -> float:
        loss = loss.double()
        dist.all_reduce(loss)
        return float(loss / self.mesh["tp"].size())
