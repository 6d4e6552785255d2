"""Trains a small model on one rank or under DDP; the arguments choose what the ladder goes through."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Tied embedding and head, dropout, batch norm, a frozen layer, a branch that one rank may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.branch = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, *, branch: bool) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.mix(self.norm(x.transpose(1, 2)).transpose(1, 2))
        if branch:
            x = x + self.branch(x)
        return self.head(x + self.frozen(x))


def main() -> None:
    args = _arguments()
    rank = int(os.environ.get("RANK", "0"))
    ranked = "WORLD_SIZE" in os.environ
    if ranked:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = Net()
    if ranked:
        model = DistributedDataParallel(
            model,
            find_unused_parameters=args.unused,
            static_graph=args.static_graph,
            gradient_as_bucket_view=args.bucket_view,
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=args.scaler)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(args.steps):
        for microbatch in range(args.accumulate):
            ids = torch.randint(0, 11, (2, 6))
            last = microbatch == args.accumulate - 1
            quiet = isinstance(model, DistributedDataParallel) and args.no_sync and not last
            with model.no_sync() if quiet else contextlib.nullcontext():
                logits = model(ids, branch=not (args.unused and rank == 1))
                loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) / args.accumulate
                if args.scaler and step == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trainable, args.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"digest {rank} {_digest(model, optimizer, losses)}")
    if ranked:
        dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-norm", type=float, default=0.05)
    for flag in ("no-sync", "scaler", "unused", "static-graph", "bucket-view"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> str:
    """Return a digest of everything that a recording must not change."""
    tensors = [*losses, *model.state_dict().values(), torch.get_rng_state()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
