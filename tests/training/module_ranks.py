"""Trains plain modules on two ranks, data parallel and tensor parallel, right and wrong, and records each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tensortrace import tracer

Linear = Callable[..., torch.Tensor]
linear: Linear = F.linear


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5)
    )


def train(module: nn.Module, rows: torch.Tensor, path: Path) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    target = torch.arange(len(rows)) % 5
    with tracer.record(path):
        for _ in range(2):
            F.cross_entropy(module(rows), target).backward()
            optimizer.step()
            optimizer.zero_grad()


def parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def by_rows(made: Callable[[DTensor, DTensor, DTensor], DTensor]) -> Linear:
    """Return a product that does as told where its weight is cut along its rows."""

    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rowwise = isinstance(weight, DTensor) and weight.placements[0].is_shard(1)
        if not rowwise:
            return linear(x, weight, bias)
        assert isinstance(x, DTensor)
        assert isinstance(weight, DTensor)
        assert isinstance(bias, DTensor)
        return made(x, weight, bias)

    return wrong


def added_twice(x: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    local = x.to_local() @ weight.to_local().T + bias.to_local()
    return DTensor.from_local(local, weight.device_mesh, [Partial()])


def not_reduced(x: DTensor, weight: DTensor, bias: DTensor) -> DTensor:
    local = x.to_local() @ weight.to_local().T + bias.to_local()
    return DTensor.from_local(local, weight.device_mesh, [Replicate()])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(5))
    train(DistributedDataParallel(model()), rows[4 * rank : 4 * rank + 4], folder / "ddp")
    train(parallel(mesh), rows, folder / "tp")
    for name, wrong in {"twice": added_twice, "unreduced": not_reduced}.items():
        F.linear = by_rows(wrong)
        train(parallel(mesh), rows, folder / name)
        F.linear = linear
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
