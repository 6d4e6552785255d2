"""Two ranks train; in the third step rank 1 stops for ever before its backward, and rank 0 waits."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = nn.functional.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 1))
    if step == 2 and dist.get_rank() == 1:
        os.write(1, b"waiting\n")
        signal.pause()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
