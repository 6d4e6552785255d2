"""Compares where fully_shard over tensor parallel rows puts each rank's part with where our integers put it.

Prints a line for each part that lies elsewhere, and how many parts were looked at.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tensortrace.tracer.geometry import region
from tensortrace.tracer.placements import split

INPUTS = 3


class Net(nn.Module):
    """Every element holds its own index, so that a part tells where it is from."""

    def __init__(self, rows):
        super().__init__()
        self.up, self.down = nn.Linear(INPUTS, rows), nn.Linear(rows, INPUTS)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.arange(p.numel()).reshape(p.shape))


def elements(parameter):
    """Return the global indices that our integers give this rank's part, in its order."""
    spec, local = split(parameter)[1], parameter.to_local()
    found = region(spec.shard(), spec.mesh, tuple(local.shape))
    whole = torch.arange(parameter.numel()).reshape(parameter.shape)
    for dim, intervals in enumerate(found.dims):
        lines = [torch.arange(start, stop) for start, stop in intervals]
        whole = whole.index_select(dim, torch.cat(lines) if lines else torch.zeros(0, dtype=torch.int64))
    return whole, local


def main() -> None:
    dist.init_process_group("gloo")
    mesh, count = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), 0
    for rows in (*range(1, 18), 21, 33):
        net = Net(rows)
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        for name, parameter in net.named_parameters():
            ours, theirs = elements(parameter)
            count += 1
            if ours.flatten().tolist() != theirs.flatten().tolist():
                print(
                    f"{rows} rows: {name} on rank {dist.get_rank()}: {theirs.tolist()}, ours {ours.tolist()}"
                )
    print(f"looked at {count}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
