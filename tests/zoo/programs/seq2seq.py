"""Train an encoder-decoder on reversing sequences, with teacher forcing, on one or more ranks."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PAD, BEGIN = 0, 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=18)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=29)
    parser.add_argument("--length", type=int, default=9)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--shuffle", action="store_true", help="another order of the batch's rows")
    parser.add_argument("--loss", choices=["module", "hand"], default="module")
    parser.add_argument("--optimizer", choices=["adam", "rmsprop", "adagrad"], default="adam")
    parser.add_argument("--foreach", choices=["yes", "no"], default="no")
    parser.add_argument("--gru", action="store_true")
    return parser.parse_args()


class Reverser(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.embed = nn.Embedding(options.vocabulary, width)
        self.place = nn.Embedding(options.length + 1, width)
        self.reader = nn.GRU(width, width, batch_first=True) if options.gru else None
        self.transformer = nn.Transformer(
            width, options.heads, 1, 1, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(width, options.vocabulary)

    def forward(self, source: Tensor, given: Tensor) -> Tensor:
        places = self.place(torch.arange(source.shape[1]))
        read = self.embed(source) + places
        if self.reader is not None:
            read = self.reader(read)[0]
        future = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).triu(1)
        x = self.transformer(read, self.embed(given) + places[: given.shape[1]], tgt_mask=future)
        return self.out(x)


def main() -> None:
    options = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model: nn.Module = Reverser(options)
    trained = DistributedDataParallel(model, bucket_cap_mb=0.01) if world > 1 else model
    kinds = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}
    optimizer = kinds[options.optimizer](model.parameters(), lr=2e-3, foreach=options.foreach == "yes")
    criterion = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(options.seed + 1)
    for _ in range(options.steps):
        source = torch.randint(2, options.vocabulary, (options.rows, options.length), generator=generator)
        if options.shuffle:
            source = source[torch.arange(options.rows).flip(0)]
        share = source[rank * options.rows // world : (rank + 1) * options.rows // world]
        for rows in share.chunk(options.microbatches):
            wanted = rows.flip(1)
            given = torch.cat([torch.full((len(rows), 1), BEGIN), wanted[:, :-1]], 1)
            scores = trained(rows, given)
            if options.loss == "module":
                loss = criterion(scores.transpose(1, 2), wanted)
            else:
                loss = (scores.logsumexp(-1) - scores.gather(2, wanted[..., None])[..., 0]).mean()
            (loss / options.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
