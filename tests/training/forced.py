"""Train a stack of twelve blocks, with mistakes planted in some of them or in how ranks share the update.

    python forced.py --plant 3:forward,9:forward
    torchrun --nproc-per-node 2 forced.py --layout tp

Every layout trains on the same rows from the same weights, and the objective is the mean over all tokens.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, VOCABULARY, ROWS, LENGTH = 16, 32, 4, 9
RATE = 1e-2


class Skewed(torch.autograd.Function):
    """The identity, whose backward is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 1.1 * gradients[0]


class Up(nn.Linear):
    """A linear layer that may be wrong in one direction."""

    plant = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.plant == "backward":
            return super().forward(Skewed.apply(x))
        return super().forward(x) * (1.02 if self.plant == "forward" else 1.0)


class Block(nn.Module):
    """Two residual branches; ``plant`` is the mistake in it, if any; inside it is ``times`` as wide."""

    times = 2

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        inside = self.times * WIDTH
        self.up, self.down = Up(WIDTH, inside), Up(inside, WIDTH)
        self.up.plant, self.down.plant = plant, "backward" if plant == "down" else ""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm1(x))
        if self.plant == "cut-branch":
            mixed = mixed.detach()
        x = x + (0.9 * mixed if self.plant == "residual" else mixed)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x.detach() if self.plant == "detach" else x


class Model(nn.Module):
    """An embedding, the blocks and a head."""

    def __init__(self, depth: int, plants: dict[int, str]) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(plants.get(number, "")) for number in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ByHand:
    """The state of an optimizer spread over ranks: each updates the parameters that are its own."""

    def __init__(self, model: nn.Module, plant: str) -> None:
        self.parameters, self.plant = list(model.parameters()), plant
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mine = [p for number, p in enumerate(self.parameters) if self.owner(number) == self.rank]
        self.inner = torch.optim.AdamW(mine, lr=RATE)

    def owner(self, number: int) -> int:
        return number % self.world

    def step(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world
        if self.plant == "other-gradient":  # of the two norms' weights, which look alike
            layer = self.parameters[1:7]
            if self.rank == self.owner(1):
                layer[0].grad.copy_(layer[2].grad)
        self.inner.step()
        for number, parameter in enumerate(self.parameters):
            source = self.owner(number)
            if self.plant == "other-owner" and number == 3:
                source = (source + 1) % self.world
            dist.broadcast(parameter.data, source)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def spread(model: nn.Module, layout: str, plant: str) -> tuple[nn.Module, Any]:
    """Return the model under a layout, and its optimizer."""
    if layout == "by-hand":
        return model, ByHand(model, plant)
    if layout == "zero":
        wrapped = DistributedDataParallel(model)
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=RATE)
    if layout == "fsdp":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, foreach=layout != "tp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=["single", "tp", "fsdp", "zero", "by-hand"], default="single")
    parser.add_argument("--plant", default="")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=2)
    options = parser.parse_args()
    Block.times = options.times
    pairs = [item.split(":") for item in options.plant.split(",") if ":" in item]
    torch.manual_seed(options.seed)
    model = Model(options.depth, {int(number): plant for number, plant in pairs})
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model, optimizer = spread(model, options.layout, options.plant)
    shared = options.layout not in ("single", "tp")
    generator = torch.Generator().manual_seed(1)
    for _ in range(options.steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        ids = ids[dist.get_rank() :: dist.get_world_size()] if shared else ids
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
