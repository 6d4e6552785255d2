"""Trains in processes of torch.multiprocessing; the parent imports torch and builds a model, no more.

Arguments: the start method, the path of a file for the rendezvous, and `raise` to fail in rank 1.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def work(rank: int, meeting: str, fails: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if fails and rank == 1:
        raise ValueError("rank 1 fails")
    dist.destroy_process_group()


def main() -> None:
    print(sum(parameter.numel() for parameter in nn.Linear(2, 1).parameters()))
    mp.start_processes(
        work, args=(sys.argv[2], sys.argv[3:] == ["raise"]), nprocs=2, start_method=sys.argv[1]
    )


if __name__ == "__main__":
    main()
