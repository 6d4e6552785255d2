"""Train a small decoder under a layout: what a step computes does not depend on it.

    python parallel.py --layout single
    torchrun --nproc-per-node 2 parallel.py --layout tp --out weights.pt

Plain PyTorch. The initial global weights, the documents of a step and the objective (the mean over all its
valid tokens) are the same for every layout. ``--plant`` plants a mistake of a kind that people have made in
that layout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from parallel_layouts import LAYOUTS
from parallel_model import Shape, build
from parallel_parts import Layout
from parallel_rows import collate, documents, share
from parallel_settings import arguments as add_settings
from torch import Tensor

RATE = 0.01
MAX_NORM = 0.7  # about the norm of the gradients, so that some steps are clipped and some are not


@dataclass(frozen=True)
class Outcome:
    """What a training computed: losses and global weights, and a digest of all that this rank holds."""

    losses: list[float]
    weights: dict[str, Tensor]
    digest: str


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="single")
    parser.add_argument("--plant", default="")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--sampler", choices=["interleaved", "contiguous"], default="interleaved")
    parser.add_argument("--repeat-rows", action="store_true")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=50)
    parser.add_argument("--pad-vocabulary", type=int, help="rows of embedding and head (--layout tp)")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--whole-attention", action="store_true", help="attention drops nothing")
    parser.add_argument("--warm", action="store_true", help="the optimizer has stepped before the training")
    parser.add_argument("--own-seed", action="store_true", help="each layout and rank draws its own numbers")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--out", help="rank 0 writes losses and global weights here")
    add_settings(parser)
    return parser.parse_args(given)


def train(options: argparse.Namespace) -> Outcome:
    """Train under the layout, in the process group that is open, and return what came out."""
    shape = Shape(
        options.depth, options.kv_heads, options.tied, options.experts, options.batch_norm,
        options.vocabulary, options.dropout, not options.whole_attention,
        options.width, options.heads, options.hidden,
    )  # fmt: skip
    seed = sum(options.layout.encode()) + int(os.environ.get("RANK", "0")) if options.own_seed else 0
    seed += options.seed
    layout = LAYOUTS[options.layout](build(shape, getattr(torch, options.dtype), seed), options)
    optimizer = layout.optimizer(RATE)
    if options.warm:
        warm(layout, optimizer)
    average = layout.settings.averaged(layout)
    losses = []
    for step in range(options.steps):
        rows = documents(step, options.repeat_rows, options.vocabulary, options.seed)
        total = sum(len(row) - 1 for row in rows)
        mine = share(rows, layout.part, layout.parts, options.sampler)
        batch = layout.padded(collate(mine))
        losses.append(layout.summed(layout.backward(batch, total)) / total)
        layout.reduce()
        layout.settings.unscale(optimizer)
        layout.clip(MAX_NORM)
        layout.update(optimizer)
        if average is not None:
            average.update_parameters(layout.model)
        optimizer.zero_grad()
    return Outcome(losses, layout.weights(), digest(layout, optimizer, losses))


def warm(layout: Layout, optimizer: torch.optim.Optimizer) -> None:
    """Take a step on gradients that differ from element to element, so that there is state of that kind."""
    for parameter in layout.parameters():
        parameter.grad = parameter.detach().clone()
    layout.update(optimizer)
    optimizer.zero_grad()


def digest(layout: Layout, optimizer: torch.optim.Optimizer, losses: list[float]) -> str:
    """Return a digest of the losses and of this rank's parameters, optimizer state and generator."""
    held = [torch.tensor(losses, dtype=torch.float64), torch.get_rng_state()]
    inner = getattr(optimizer, "optim", optimizer)  # what a ZeroRedundancyOptimizer shards
    for parameter in layout.parameters():
        state = inner.state.get(parameter, {})
        held += [parameter, *(state[name] for name in sorted(state) if isinstance(state[name], Tensor))]
    sha = hashlib.sha256()
    for tensor in held:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sha.update(f"{local.dtype} {tuple(local.shape)} ".encode())
        sha.update(local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    outcome = train(options)
    if int(os.environ.get("RANK", "0")) == 0:
        print("losses", *(f"{loss:.6f}" for loss in outcome.losses))
        if options.out:
            torch.save({"losses": outcome.losses, "weights": outcome.weights}, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
