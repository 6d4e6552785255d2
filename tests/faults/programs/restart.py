"""Trains on two ranks; in the first attempt rank 1 dies after its first step.

The argument is the path of a file for the rendezvous: gloo over the agent's store may meet addresses of
the first attempt in the second.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.{attempt}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if attempt == "0" and rank == 1:
            raise RuntimeError("the first attempt fails")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
