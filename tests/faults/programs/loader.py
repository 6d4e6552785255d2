"""Trains on what DataLoader workers make, which run a module with gradients themselves."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Features(Dataset[torch.Tensor]):
    """Rows that come out of a module of the worker's own."""

    def __init__(self) -> None:
        self.extract = nn.Linear(3, 4)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.extract(torch.full((3,), float(index)))
        row.sum().backward()
        return row.detach()


def main() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Features(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    for _ in range(2):
        for rows in loader:
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print("trained")


if __name__ == "__main__":
    main()
