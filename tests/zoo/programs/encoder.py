"""Train a masked language model: torch's transformer encoder layers with padding masks, on one or more ranks.

The objective is the mean over the masked tokens of the whole batch, plus a sentence loss of its rows.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PAD, MASK = 0, 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=20)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=47)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--mask", choices=["padding", "additive"], default="padding")
    parser.add_argument("--pad-to", type=int, default=0)
    parser.add_argument("--norm-first", action="store_true")
    parser.add_argument("--loss", choices=["ignore", "select"], default="ignore")
    parser.add_argument("--autocast", action="store_true")
    return parser.parse_args()


class Encoder(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width, self.heads, self.mask = options.width, options.heads, options.mask
        self.words = nn.Embedding(options.vocabulary, width, padding_idx=PAD)
        self.positions = nn.Embedding(options.length + 10, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, options.heads, 2 * width + 3, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=options.norm_first,
            )
            for _ in range(2)
        )  # fmt: skip
        self.words_out = nn.Linear(width, options.vocabulary)
        self.sentence = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        padded = tokens == PAD
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            if self.mask == "padding":
                x = layer(x, src_key_padding_mask=padded)
            else:
                wide = torch.zeros(padded.shape, dtype=torch.float32).masked_fill(padded, float("-inf"))
                mask = wide[:, None, None, :].expand(-1, self.heads, tokens.shape[1], -1).flatten(0, 1)
                x = layer(x, src_mask=mask)
        return self.words_out(x), self.sentence(x[:, 0])


def rows_of(options: argparse.Namespace, step: int) -> list[tuple[Tensor, Tensor, int]]:
    """Return, for every row of a step, tokens with some masked, the words under the masks, and a label."""
    generator = torch.Generator().manual_seed(31 * options.seed + step)
    found = []
    for _ in range(options.rows):
        length = int(torch.randint(4, options.length + 1, (1,), generator=generator))
        words = torch.randint(2, options.vocabulary, (length,), generator=generator)
        hidden = torch.rand(length, generator=generator) < 0.3
        hidden[1] = True
        label = int(torch.randint(0, 2, (1,), generator=generator))
        found.append((words.masked_fill(hidden, MASK), words.masked_fill(~hidden, -100), label))
    return found


def collate(rows: list[tuple[Tensor, Tensor, int]], pad_to: int) -> tuple[Tensor, Tensor, Tensor]:
    length = max(pad_to, max(len(tokens) for tokens, _, _ in rows))
    tokens = torch.stack([F.pad(t, (0, length - len(t)), value=PAD) for t, _, _ in rows])
    words = torch.stack([F.pad(w, (0, length - len(w)), value=-100) for _, w, _ in rows])
    return tokens, words, torch.tensor([label for _, _, label in rows])


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model: nn.Module = Encoder(options)
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    for step in range(options.steps):
        rows = rows_of(options, step)
        total = sum(int((words >= 0).sum()) for _, words, _ in rows)
        mine = rows[rank::world]
        each = len(mine) // options.microbatches
        for number in range(options.microbatches):
            tokens, words, labels = collate(mine[number * each : (number + 1) * each], options.pad_to)
            with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
                scores, sentence = trained(tokens)
            scores, sentence = scores.float(), sentence.float()
            if options.loss == "ignore":
                told = F.cross_entropy(scores.flatten(0, 1), words.flatten(), reduction="sum")
            else:
                asked = words >= 0
                told = F.cross_entropy(scores[asked], words[asked], reduction="sum")
            loss = told / total + 0.5 * F.cross_entropy(sentence, labels, reduction="sum") / len(rows)
            (loss * world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
