"""The documents of the tests: of unequal length, eight a step, and which of them each data rank reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from parallel_model import PAD
from torch import Tensor

IGNORE = -100
ROWS = 8
LENGTHS = (9, 5, 7, 3, 8, 6, 11, 4)


@dataclass(frozen=True)
class Batch:
    """Tokens and next tokens, both [rows, longest row]."""

    tokens: Tensor
    targets: Tensor

    def chunks(self, count: int) -> list[Batch]:
        """Return ``count`` microbatches of consecutive rows; each is cut to its own longest row."""
        parts = zip(self.tokens.chunk(count), self.targets.chunk(count), strict=True)
        return [Batch(tokens, targets).cut() for tokens, targets in parts]

    def cut(self) -> Batch:
        longest = int((self.tokens != PAD).sum(-1).max())
        return Batch(self.tokens[:, :longest], self.targets[:, :longest])

    def padded(self, length: int) -> Batch:
        """Return the batch with rows of at least ``length``."""
        extra = (0, max(0, length - self.tokens.shape[1]))
        pad = torch.nn.functional.pad
        return Batch(pad(self.tokens, extra, value=PAD), pad(self.targets, extra, value=IGNORE))

    def valid(self) -> int:
        return int((self.targets != IGNORE).sum())


def documents(step: int, repeat: bool, vocabulary: int, seed: int = 0) -> list[Tensor]:
    """Return the step's documents; with ``repeat`` the last is the first again."""
    numbers = torch.Generator().manual_seed(100 + 1000 * seed + step)
    lengths = LENGTHS[step:] + LENGTHS[:step]
    rows = [torch.randint(1, vocabulary, (length + 1,), generator=numbers) for length in lengths]
    return [*rows[:-1], rows[0]] if repeat else rows


def collate(rows: list[Tensor]) -> Batch:
    """Pad to the longest of these rows."""
    shape = (len(rows), max(len(row) for row in rows) - 1)
    batch = Batch(torch.full(shape, PAD), torch.full(shape, IGNORE))
    for number, row in enumerate(rows):
        batch.tokens[number, : len(row) - 1] = row[:-1]
        batch.targets[number, : len(row) - 1] = row[1:]
    return batch


def share(rows: list[Tensor], part: int, parts: int, sampler: str) -> list[Tensor]:
    """Return the rows of one data rank: every ``parts``-th, or a contiguous run."""
    if sampler == "interleaved":
        return rows[part::parts]
    size = len(rows) // parts
    return rows[part * size : (part + 1) * size]
