"""Trains a perceptron, recorded onto a disk of 20 MB a second: ``throttled.py plain|block|drop ROOT``.

Prints the peak of its memory in MiB and how much was written.
"""

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

from tensortrace.tracer import record, writer_files

BYTES_A_SECOND, BUFFER, STEPS = 20e6, "16MiB", 4
WRITES: list[int] = []


def train() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(256, 512)).square().mean().backward()
        optimizer.step()


def slowly(descriptor: int, parts: object, offset: int) -> int:
    written = write(descriptor, parts, offset)
    WRITES.append(written)
    time.sleep(written / BYTES_A_SECOND)
    return written


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


write = writer_files.write_all
pressure, root = sys.argv[1:]
if pressure == "plain":
    train()
else:
    writer_files.write_all = slowly
    with record(root, buffer=BUFFER, on_pressure=pressure, compress="none", min_free="0"):
        train()
print(json.dumps({"peak_mib": peak_mib(), "written": sum(WRITES)}))
