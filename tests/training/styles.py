"""Training programs in the styles that people write: ``python styles.py STYLE [BUG]``, on one rank or two."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS, BATCH = 3, 8
BUG = sys.argv[2] if len(sys.argv) > 2 else ""


def mine(batch: Tensor) -> Tensor:
    """Return this rank's rows of the global batch."""
    return batch.chunk(WORLD)[RANK]


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if WORLD > 1 else model


def criterion(numbers: torch.Generator) -> None:
    """Float inputs and an nn.CrossEntropyLoss module."""
    model = wrapped(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 5)))
    loss_of, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 12, generator=numbers), torch.randint(0, 5, (BATCH,), generator=numbers)
        optimizer.zero_grad()
        loss_of(model(mine(x)), mine(y)).backward()
        optimizer.step()


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Causal(nn.Module):
    """A recurrent language model that shifts its labels and returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.rnn(self.embed(ids))[0])
        flat, targets = logits[:, :-1].reshape(-1, 20), labels[:, 1:].reshape(-1)
        return Output(F.cross_entropy(flat, targets, ignore_index=-100, reduction="sum"), logits)


def causal(numbers: torch.Generator) -> None:
    """A model that returns a dataclass with its loss, scaled outside; padded to each rank's own length."""
    model = wrapped(Causal())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        ids = torch.randint(1, 20, (BATCH, 10), generator=numbers)
        lengths = torch.randint(4, 11, (BATCH,), generator=numbers)
        valid = torch.arange(10) < lengths[:, None]
        ids, labels = ids.masked_fill(~valid, 0), ids.masked_fill(~valid, -100)
        longest = int(mine(lengths).max())
        count = int((labels[:, 1:] != -100).sum())
        optimizer.zero_grad()
        loss = model(ids=mine(ids)[:, :longest], labels=mine(labels)[:, :longest]).loss / count
        (loss if BUG == "no-world" else loss * WORLD).backward()
        optimizer.step()


def masked(numbers: torch.Generator) -> None:
    """Loss per token, flattened, times a mask."""
    model = wrapped(nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 9)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 6, 5, generator=numbers), torch.randint(0, 9, (BATCH, 6), generator=numbers)
        mask = (torch.rand(BATCH, 6, generator=numbers) > 0.3).float()
        optimizer.zero_grad()
        each = F.cross_entropy(model(mine(x)).flatten(0, 1), mine(y).flatten(), reduction="none")
        if BUG == "no-mask":
            mask = torch.ones_like(mask)
        if BUG.endswith("weighted"):  # some tokens matter more than others, as advantages make them
            mask = mask * (1 + y % 3 + (BUG == "other-weighted") * (x[..., 0] > 0))
        kept = (each * mine(mask).flatten()).sum()
        (kept / mine(mask).sum() if BUG == "local-means" else kept / mask.sum() * WORLD).backward()
        optimizer.step()


class Recurrent(nn.Module):
    """Positions first, as recurrent layers have them; scores flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(11, 8), nn.GRU(8, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(ids))[0]).flatten(0, 1)


def recurrent(numbers: torch.Generator) -> None:
    """Ids [positions, rows], ranks take columns."""
    model = wrapped(Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        ids = torch.randint(1, 11, (7, BATCH), generator=numbers).chunk(WORLD, 1)[RANK]
        optimizer.zero_grad()
        F.cross_entropy(model(ids[:-1]), ids[1:].flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    styles = {"criterion": criterion, "causal": causal, "masked": masked, "recurrent": recurrent}
    styles[sys.argv[1]](torch.Generator().manual_seed(1))
    gc.collect()  # a DDP module that outlives its group may abort at exit
    if WORLD > 1:
        dist.destroy_process_group()
