"""Trains one small model in one process or split over the stages of a pipeline, in several ways."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, LAYERS, ROWS, CHUNKS = 8, 13, 4, 8, 4
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    """Token ids to logits; a stage of it lacks some of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def stage_module(how: str, number: int, count: int) -> nn.Module:
    """Build the whole model, as every process does, and take one stage's part of it."""
    torch.manual_seed(0)
    net = Net()
    mine = [str(i) for i in range(number * LAYERS // count, (number + 1) * LAYERS // count)]
    if how == "renumbered":
        net.layers = nn.ModuleDict({str(i): net.layers[name] for i, name in enumerate(mine)})
    elif how == "deleted":
        for name in set(net.layers) - set(mine):
            del net.layers[name]
    if how in ("deleted", "renumbered"):
        net.embed = net.embed if number == 0 else None
        net.head = net.head if number == count - 1 else None
        return net
    assert how == "sliced"
    parts = [net.layers[name] for name in mine]
    first, last = [net.embed] if number == 0 else [], [net.head] if number == count - 1 else []
    KEPT.append(net)
    return nn.Sequential(*first, *parts, *last)


KEPT: list[nn.Module] = []
"""Models whose parts the stages are; names are theirs while they live, but not those of a traced pipeline."""


def stages(
    args: argparse.Namespace, group: dist.ProcessGroup, dp: dist.ProcessGroup
) -> Iterator[PipelineStage]:
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), torch.device("cpu")
    count = size * args.stages_per_rank
    for number in range(rank, count, size):
        if args.split == "traced":
            torch.manual_seed(0)
            ends = {f"layers.{i * LAYERS // count - 1}": SplitPoint.END for i in range(1, count)}
            example = torch.zeros(ROWS // CHUNKS, 5, dtype=torch.long)
            KEPT.append(pipe := pipeline(Net(), (example,), split_spec=ends))
            yield pipe.build_stage(number, device, group)
        else:
            module = stage_module(args.split, number, count)
            if args.dp > 1 and args.data == "fsdp2":
                fully_shard(module, mesh=DeviceMesh.from_group(dp, "cpu", mesh_dim_names=("fsdp",)))
            elif args.dp > 1:
                # as it is by default, DDP fails in the second step of a pipeline (torch 2.13)
                module = DistributedDataParallel(module, process_group=dp, find_unused_parameters=True)
            yield PipelineStage(module, number, count, device, group=group)


def batches(args: argparse.Namespace, replica: int) -> Iterator[torch.Tensor]:
    """Yield each step's token ids; replicas of the model share the rows out, one after the other."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(args.steps * args.passes):
        yield torch.randint(0, WORDS, (args.dp * ROWS, 5), generator=generator).chunk(args.dp)[replica]


def train_whole(args: argparse.Namespace) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scale = CHUNKS * args.passes * args.dp
    replicas = [batches(args, replica) for replica in range(args.dp)]
    for _ in range(args.steps):
        for _ in range(args.passes):
            for rows in replicas:
                for chunk in next(rows).chunk(CHUNKS):
                    loss = loss_of(net(chunk), chunk) / scale
                    loss.backward()
                    losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *net.state_dict().values()]


def train_stages(args: argparse.Namespace) -> list[torch.Tensor]:
    """Ranks 0, dp, 2 dp … are one pipeline; ranks 0 … dp - 1 hold the same stage."""
    world, rank = dist.get_world_size(), dist.get_rank()
    pipelines = [dist.new_group(list(range(r, world, args.dp))) for r in range(args.dp)]
    replicas = [dist.new_group(list(range(r, r + args.dp))) for r in range(0, world, args.dp)]
    held = list(stages(args, pipelines[rank % args.dp], replicas[rank // args.dp]))
    kind = SCHEDULES[args.schedule]
    # a schedule divides all of .grad each time it runs, so several runs in a window leave it to the program
    settings = {"loss_fn": loss_of, "scale_grads": args.passes == 1}
    schedule = kind(held if args.stages_per_rank > 1 else held[0], CHUNKS, **settings)
    parameters = [parameter for stage in held for parameter in stage.submod.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    rows = batches(args, rank % args.dp)
    for _ in range(args.steps):
        for _ in range(args.passes):
            ids, found = next(rows), []
            given = (ids,) if any(stage.is_first for stage in held) else ()
            ends = any(stage.is_last for stage in held)
            schedule.step(*given, target=ids if ends else None, losses=found)
            losses += [loss.detach() for loss in found]
        for parameter in parameters:
            if parameter.grad is not None and args.passes > 1:
                parameter.grad.div_(args.passes * CHUNKS)
        optimizer.step()
        optimizer.zero_grad()
    state = [value for stage in held for value in stage.submod.state_dict().values()]
    state += [value for entry in optimizer.state.values() for value in entry.values()]
    return [*losses, *(value.to_local() if isinstance(value, DTensor) else value for value in state)]


def main() -> None:
    args = _arguments()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        found = train_stages(args)
        os.write(1, f"digest {dist.get_rank()} {_digest(found)}\n".encode())  # ranks share the pipe
        dist.destroy_process_group()
    else:
        print(f"digest 0 {_digest(train_whole(args))}")


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in (*tensors, torch.get_rng_state()):
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--data", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--split", choices=["deleted", "renumbered", "sliced", "traced"], default="deleted")
    for name, default in (("steps", 2), ("passes", 1), ("dp", 1), ("stages-per-rank", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
