"""Trains a small model in one process, or under FullyShardedDataParallel in several ways, recorded and not.

    python fsdp1.py FOLDER
    torchrun --nproc-per-node 2 fsdp1.py FOLDER

Leaves a trace FOLDER/NAME for each way and prints, for each rank and way, whether recording changed a bit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tensortrace import tracer

ROWS, CHUNKS, STEPS = 4, 2, 2
"""Rows of a chunk on each of two ranks."""


class Way(NamedTuple):
    strategy: str
    original: bool
    quiet: bool = False


WAYS = {
    "full": Way("FULL_SHARD", True),
    "full-flat": Way("FULL_SHARD", False, quiet=True),
    "grad-op": Way("SHARD_GRAD_OP", True, quiet=True),
    "grad-op-flat": Way("SHARD_GRAD_OP", False),
    "no-shard": Way("NO_SHARD", True, quiet=True),
    "no-shard-flat": Way("NO_SHARD", False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.mix = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Net(nn.Module):
    """Sizes that two ranks don't divide; a buffer; a unit for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.leave = nn.Linear(5, 7)
        self.register_buffer("shift", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.blocks(self.enter(x + self.shift)))


def rows(step: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + chunk)
    both = (
        torch.randn(2 * ROWS, 3, generator=generator),
        torch.randint(0, 7, (2 * ROWS,), generator=generator),
    )
    if not dist.is_initialized():
        return both
    return both[0].chunk(2)[dist.get_rank()], both[1].chunk(2)[dist.get_rank()]


def train(way: Way | None) -> str:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if way is not None:
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[way.strategy],
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=way.original,
        )
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        for chunk in range(CHUNKS):
            quiet = way is not None and way.quiet and chunk < CHUNKS - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                x, target = rows(step, chunk)
                loss = F.cross_entropy(model(x), target) / CHUNKS
                loss.backward()
            losses.append(loss.detach())
        clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
        (model.clip_grad_norm_ if way is not None else clip)(0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(rows(9, 9)[0]))
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    found = hashlib.sha256()
    for tensor in (*losses, *(p.detach() for p in model.parameters()), *state, torch.get_rng_state()):
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    warnings.simplefilter("ignore")
    folder, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for name, way in WAYS.items() if dist.is_initialized() else [("alone", None)]:
        alone = train(way)
        with tracer.record(str(folder / name), min_free="0"):
            watched = train(way)
        os.write(1, f"{name} {rank} {'same' if watched == alone else 'different'}\n".encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
