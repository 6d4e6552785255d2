"""Corners of training code, many recordings in one process: ``python corners.py FOLDER CASE[:BUG]…``.

Each case trains from the same seed on the same global batches, on one rank or on several, and leaves its
trace in ``FOLDER/CASE[:BUG]``. Prints one line ``CASE[:BUG] DIGEST`` for each.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tensortrace import tracer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS, BATCH = 3, 8


class Case:
    """One training: ``run`` returns the tensors whose bits must not depend on being recorded."""

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.numbers = torch.Generator().manual_seed(1)

    def rows(self, *features: int) -> Tensor:
        """Return this rank's rows of the next global batch."""
        return torch.randn(BATCH, *features, generator=self.numbers)[RANK::WORLD]

    def labels(self, classes: int, *positions: int) -> Tensor:
        """Return this rank's labels of the next global batch."""
        return torch.randint(0, classes, (BATCH, *positions), generator=self.numbers)[RANK::WORLD]


def wrapped(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if WORLD > 1 else model


def state(*modules: nn.Module) -> list[Tensor]:
    return [tensor for module in modules for tensor in module.state_dict().values()]


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, noise: Tensor) -> Tensor:
        return self.body(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1))

    def forward(self, sample: Tensor) -> Tensor:
        return self.body(sample)


def adversaries(case: Case) -> list[Tensor]:
    """A generator and a critic, each with an optimizer and a step of its own."""
    generator = wrapped(Generator())
    critic = Critic() if case.bug == "bare" else wrapped(Critic())
    makes = torch.optim.Adam(generator.parameters(), lr=1e-2)
    judges = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(STEPS):
        real, noise = case.rows(6), case.rows(4)
        with torch.no_grad():
            fake = generator(noise)
        judges.zero_grad()
        scores = torch.cat([critic(real), critic(fake)])
        F.binary_cross_entropy_with_logits(
            scores, (torch.arange(len(scores)) < len(real)).float()[:, None]
        ).backward()
        judges.step()
        makes.zero_grad()
        score = critic(generator(noise))
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        makes.step()
    return state(generator, critic)


def frozen_encoder(case: Case) -> list[Tensor]:
    """A frozen encoder called before the model that is trained, and a validation batch after each step."""
    encoder = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6)).requires_grad_(False)
    model = wrapped(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            with torch.no_grad():
                features = encoder(case.rows(4))
            (F.cross_entropy(model(features), case.labels(5)) / 2).backward()
        optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                model(encoder(case.rows(4)))
    return state(model)


def skips(case: Case) -> list[Tensor]:
    """One update is left out by rank 1: because of its own loss, or by its own scaler."""
    model = wrapped(classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        odd = step == 1 and RANK == 1
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(case.rows(6)), case.labels(5))).backward()
        if odd and case.bug == "continue":
            continue
        scaler.unscale_(optimizer)
        if odd and case.bug == "scaler":  # as if rank 1 alone held a part of the model that overflowed
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][torch.device("cpu")].fill_(1)
        scaler.step(optimizer)
        scaler.update()
    return state(model)


class Recomputing(nn.Module):
    """Two residual blocks, checkpointed or not; dropout only where a bug wants it."""

    def __init__(self, *, reentrant: bool | None, keep: bool, dropout: float) -> None:
        super().__init__()
        self.reentrant, self.keep = reentrant, keep
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(16, 5)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            if self.reentrant is None:
                hidden = hidden + block(hidden)
            else:
                hidden = hidden + checkpoint(
                    block, hidden, use_reentrant=self.reentrant, preserve_rng_state=self.keep
                )
        return self.last(hidden)


def recomputing(case: Case) -> list[Tensor]:
    """Activation checkpointing on several ranks, of either kind, and none on one."""
    reentrant = None if WORLD == 1 and not case.bug else case.bug != "other"
    dropout = 0.5 if case.bug in ("dropout", "lost") else 0.0
    model = wrapped(Recomputing(reentrant=reentrant, keep=case.bug != "lost", dropout=dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(case.rows(6)), case.labels(5)).backward()
        optimizer.step()
    return state(model)


def batch_norm(case: Case) -> list[Tensor]:
    """A batch norm, which makes the rows of one rank's microbatch depend on each other."""
    model = wrapped(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(case.rows(6)), case.labels(5)).backward()
        optimizer.step()
    return state(model)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of a user's own, which leaves out ``super().__init__()``."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.defaults = {"lr": lr}
        self.state = defaultdict(dict)
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                    kept.mul_(0.9).add_(parameter.grad, alpha=0.1)
                    parameter.sub_(kept, alpha=group["lr"])


def averages(case: Case) -> list[Tensor]:
    """Moving averages of three kinds, an optimizer of one's own, and another for the last layer."""
    net = classifier()
    model = wrapped(net)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    copied = copy.deepcopy(net).requires_grad_(False)
    table = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizers = [SignDescent(net[0].parameters(), 0.05), torch.optim.Adam(net[2].parameters(), lr=1e-2)]
    for _ in range(STEPS):
        F.cross_entropy(model(case.rows(6)), case.labels(5)).backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()
        average.update_parameters(net)
        with torch.no_grad():
            for old, new in zip(copied.parameters(), net.parameters(), strict=True):
                old.mul_(0.5).add_(new, alpha=0.5)
            for name, new in net.named_parameters():
                table[name].lerp_(new, 0.25 if case.bug == "decay" else 0.5)
    return [*state(net, average, copied), *table.values()]


CASES: dict[str, Callable[[Case], list[Tensor]]] = {
    "adversaries": adversaries,
    "frozen_encoder": frozen_encoder,
    "skips": skips,
    "recomputing": recomputing,
    "batch_norm": batch_norm,
    "averages": averages,
}


def digest(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    total.update(torch.get_rng_state().numpy().tobytes())
    return total.hexdigest()


def run(name: str) -> str:
    case, _, bug = name.partition(":")
    torch.manual_seed(0)
    return digest(CASES[case](Case(bug)))


def main() -> None:
    folder = Path(sys.argv[1])
    if WORLD > 1:
        dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        alone = run(name)
        gc.collect()
        with tracer.record(folder / name, min_free="0", buffer="64MiB"):
            recorded = run(name)
        gc.collect()  # a DDP module that outlives its group may abort at exit
        told = f"{name} {alone} {recorded}\n"
        os.write(1, told.encode())  # ranks share the pipe
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
