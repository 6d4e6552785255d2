"""Trains on the same documents under several packings: each alone in a row, or several in one row.

A document sees itself alone: attention is causal within it, and positions count from its beginning. One
recording is made for each name behind the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer

HIDDEN, VOCABULARY, IGNORE = 8, 30, -100
LENGTHS = (5, 3, 7, 4, 6, 2)

PACKINGS = {
    "alone": ((0,), (1,), (2,), (3,), (4,), (5,)),
    "pairs": ((0, 1), (2, 3), (4, 5)),
    "others": ((4, 2), (5, 0), (1, 3)),
    "line": ((3, 0, 5, 1, 4, 2),),
    "other line": ((1, 3, 4, 0, 2, 5),),
    "leaking": ((4, 2), (5, 0), (1, 3)),
    "positions": ((4, 2), (5, 0), (1, 3)),
}


class Model(nn.Module):
    def __init__(self, leaking):
        super().__init__()
        torch.manual_seed(0)
        self.leaking = leaking
        self.token, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(16, HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens, positions, lengths=None):
        """``positions`` count in each document; ``lengths`` are cumulative, of the one row's documents."""
        if lengths is not None:
            document = torch.bucketize(torch.arange(tokens.shape[1]), lengths[1:], right=True)[None]
        else:
            document = (positions == 0).cumsum(-1)
        x = self.token(tokens) + self.position(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        unseen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None]
        if not self.leaking:
            unseen = unseen | (document[:, :, None] != document[:, None, :])
        scores = (q @ k.transpose(1, 2)).masked_fill(unseen, float("-inf"))
        return self.head(x + self.out(scores.softmax(-1) @ v))


def packed(documents, packing, wrong):
    """Return tokens, positions, targets [rows, longest row] and the cumulative lengths of a single row."""
    rows = [[documents[n] for n in numbers] for numbers in packing]
    longest = max(sum(len(d) - 1 for d in row) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    positions, targets = tokens.clone(), torch.full_like(tokens, IGNORE)
    lengths = [0]
    for number, row in enumerate(rows):
        at = 0
        for document in row:
            end = at + len(document) - 1
            tokens[number, at:end], targets[number, at:end] = document[:-1], document[1:]
            positions[number, at:end] = torch.arange(end - at)
            at = end
            lengths.append(end)
        if wrong:  # the last document's positions go on where the one before ended
            first = at - len(row[-1]) + 1
            positions[number, first:at] += 1
    return tokens, positions, targets, torch.tensor(lengths) if len(rows) == 1 else None


def train(name):
    model = Model(name == "leaking")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(2):
        draws = torch.Generator().manual_seed(step)
        documents = [torch.randint(1, VOCABULARY, (n + 1,), generator=draws) for n in LENGTHS]
        tokens, positions, targets, lengths = packed(documents, PACKINGS[name], name == "positions")
        logits = model(tokens, positions) if lengths is None else model(tokens, positions, lengths)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    for packing in sys.argv[2:]:
        with tracer.record(Path(sys.argv[1]) / packing, min_free="0"):
            train(packing)
