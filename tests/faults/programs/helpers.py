"""Trains, and starts two other Pythons: one that only imports torch, one that trains by itself."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

IMPORTS = "import torch; torch.nn.Linear(2, 2)"
TRAINS = (
    "import torch; m = torch.nn.Linear(2, 1); m(torch.ones(1, 2)).sum().backward(); print('helper trained')"
)


def main() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            subprocess.run([sys.executable, "-c", TRAINS], check=True)
    print("trained")


if __name__ == "__main__":
    main()
