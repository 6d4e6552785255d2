"""A small training that takes every path a recorder hooks into, and prints a digest of all it did.

`--end HOW` says how the process leaves: normally, by `os._exit`, or by raising in the second step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tensortrace.tracer import boundary


class Net(nn.Module):
    """Tied embeddings, dropout, batch norm and a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.norm = nn.BatchNorm1d(8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = boundary("hidden", self.norm(self.embed(ids).flatten(0, 1)))
        hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        return self.head(hidden)


def digest(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def by_hand(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -F.log_softmax(scores, -1).gather(1, target[:, None]).mean()


def slope(net: Net) -> torch.Tensor:
    """Return a gradient that no optimizer asked for."""
    hidden = torch.ones(1, 8, requires_grad=True)
    return torch.autograd.grad(net.block(hidden).sum(), hidden)[0]


GROUPS: list[dist.ProcessGroup] = []
"""The group of this rank alone, once it was made."""


def pipelined(net: Net) -> torch.Tensor:
    """Run one layer as a pipeline of one stage, with a torch module that each training imports anew."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleGPipe

    if not GROUPS:
        GROUPS.extend(dist.new_group([rank]) for rank in range(dist.get_world_size()))
    stage = PipelineStage(net.block, 0, 1, torch.device("cpu"), group=GROUPS[dist.get_rank()])
    losses: list[torch.Tensor] = []
    ScheduleGPipe(stage, 2, loss_fn=F.mse_loss).step(torch.ones(2, 8), target=torch.ones(2, 8), losses=losses)
    sys.modules.pop("torch.distributed.pipelining.schedules")
    return losses[0]


def train(steps: int, *, end: str = "normally", say: bool = False) -> str:
    """Train and return one digest over losses, parameters, buffers, optimizer state and generators."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(7)
    net = Net()
    net.norm.weight.register_hook(lambda gradient: gradient * 0.5)
    model: nn.Module = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    average = torch.optim.swa_utils.AveragedModel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(steps):
        for loss_of in (F.cross_entropy, by_hand):
            ids = torch.randint(0, 17, (4, 6))
            loss = loss_of(model(ids), ids.flatten()) / 2
            if step == 1:
                loss = loss * float("inf")  # the scaler skips this step
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        if end == "raise" and step == 1:
            raise ValueError("the user's own mistake")
        if dist.is_initialized() and step == 0:
            losses.append(pipelined(net))
        losses.append(slope(net))  # in the window: after the step it would open the next one
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(net)
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(losses[-1])
            dist.all_reduce(losses[-1], async_op=True).wait()
        with torch.no_grad():
            losses.append(model(torch.arange(6)[None]).sum())
        if say:
            os.write(1, f"step {step} done\n".encode())
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return digest(
        *losses, *average.state_dict().values(), *model.state_dict().values(), *state, torch.get_rng_state()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--end", choices=["normally", "os_exit", "raise"], default="normally")
    parser.add_argument("--say", action="store_true")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    outcome = train(arguments.steps, end=arguments.end, say=arguments.say)
    os.write(1, f"digest {os.environ.get('RANK', '0')} {outcome}\n".encode())  # ranks share the pipe
    if "RANK" in os.environ:
        # gloo's threads drop the last collective's work under the interpreter's lock: where they are late,
        # torch 2.13 aborts as the interpreter ends, recorded or not (two of twelve plain runs, machine busy)
        time.sleep(0.2)
    if arguments.end == "os_exit":
        os._exit(5)


if __name__ == "__main__":
    main()
