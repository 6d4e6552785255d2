"""A small training in which, on demand, numbers stop being finite, the loss jumps, or a signal is handled."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--nan-at", type=int, default=-1, help="on the last rank")
    parser.add_argument("--spike-at", type=int, default=-1)
    parser.add_argument("--until", help="train until this file is there")
    parser.add_argument("--handle", choices=["before", "after"], help="a handler of its own for SIGUSR1")
    arguments = parser.parse_args()
    if arguments.handle == "before":
        handle()
    ranked = "RANK" in os.environ
    if ranked:
        dist.init_process_group("gloo")
    rank, last = (dist.get_rank(), dist.get_world_size() - 1) if ranked else (0, 0)
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    net = DistributedDataParallel(net) if ranked else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    losses = []
    for step in range(arguments.steps):
        inputs, targets = torch.randn(8, 64), torch.randint(0, 4, (8,))
        if step == arguments.nan_at and rank == last:
            inputs[0, 0] = float("nan")
        scores = net(inputs)
        loss = F.cross_entropy(scores * (500 if step == arguments.spike_at else 1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == 2 and arguments.handle == "after":
            handle()
        os.write(1, f"step {step} done\n".encode())
        if step > 4 and arguments.until:
            time.sleep(0.02)
            if os.path.exists(arguments.until):
                break
    total = hashlib.sha256()
    for tensor in (*losses, *net.state_dict().values(), torch.get_rng_state()):
        total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    os.write(1, f"digest {rank} {total.hexdigest()}\n".encode())
    if ranked:
        time.sleep(0.2)  # see train.py


def handle() -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: os.write(1, b"handled\n"))


if __name__ == "__main__":
    main()
