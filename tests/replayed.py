"""Records small models in this process, each trained by an optimizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad

from tensortrace import tracer

STEPS, IGNORED = 3, -100


class Lion(torch.optim.Optimizer):
    """As its paper has it (Chen et al. 2023, Algorithm 2)."""

    def __init__(self, params: Iterable[nn.Parameter], **given: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1} | given)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                ahead = average * first + param.grad * (1 - first)
                param.add_(ahead.sign(), alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


class Mystery(torch.optim.Optimizer):
    """Nobody's formula."""

    def __init__(self, params: Iterable[nn.Parameter], **given: Any) -> None:
        super().__init__(params, {"lr": 1e-3} | given)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(torch.tanh(param.grad), alpha=group["lr"])


OPTIM = torch.optim
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (OPTIM.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (OPTIM.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (OPTIM.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (OPTIM.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamax": (OPTIM.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "nadam": (OPTIM.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (OPTIM.RAdam, {"lr": 0.01, "betas": (0.9, 0.7), "weight_decay": 0.1}),
    "adagrad": (OPTIM.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": (OPTIM.Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    "rmsprop": (OPTIM.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "centered": (OPTIM.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "rprop": (OPTIM.Rprop, {"lr": 0.01}),
    "asgd": (OPTIM.ASGD, {"lr": 0.1, "weight_decay": 0.1, "t0": 1.0, "lambd": 0.01}),
    "adafactor": (OPTIM.Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    "lion": (Lion, {}),
}
"""One of each family, with the options that take other ways through its formula."""

WITHOUT_FOREACH = {"lion"}
FUSED = ("sgd", "momentum", "adam", "amsgrad", "adamw", "adagrad")
OF_COMPLEX = tuple(name for name in OPTIMIZERS if name not in {"adafactor", "lion"})


class Branch(nn.Module):
    """Scores of five classes; of complex weights the magnitude."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6, dtype=dtype) / 3)
        self.bias = nn.Parameter(torch.randn(5, dtype=dtype) / 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = F.linear(rows.to(self.weight.dtype), self.weight, self.bias)
        return scores.abs() if scores.is_complex() else scores


class Run:
    """Trains one branch for each optimizer on the same batches, two microbatches of unequal count a window.

    A planted mistake overrides one of the methods.
    """

    schedules: ClassVar[dict[str, Callable[[torch.optim.Optimizer], Any]]] = {}
    names: Iterable[str] = OPTIMIZERS
    classes: ClassVar[dict[str, type[torch.optim.Optimizer]]] = {}
    max_norm: float | None = 1.0

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict({name: Branch(dtype) for name in self.names})
        self.optimizers = {
            name: self.classes.get(name, OPTIMIZERS[name][0])(
                self.model[name].parameters(),
                **OPTIMIZERS[name][1],
                **({} if name in WITHOUT_FOREACH else options),
            )
            for name in self.names
        }
        self.schedulers = {n: make(self.optimizers[n]) for n, make in self.schedules.items()}
        self.batches = torch.Generator().manual_seed(5)

    def losses(self, rows: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the sum over the optimizers' branches of the mean loss over the window's valid tokens."""
        total = torch.zeros(())
        for name in self.names:
            scores = self.model[name](rows).float()
            total = total + F.cross_entropy(scores, labels, reduction="sum") / tokens
        return total

    def clip(self) -> None:
        """Clip all branches' gradients by their common norm."""
        if self.max_norm is not None:
            clip_grad.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def update(self, step: int) -> None:
        """Let all optimizers and schedulers make their step."""
        for optimizer in self.optimizers.values():
            optimizer.step()
        for scheduler in self.schedulers.values():
            scheduler.step()

    def accumulated(self, microbatch: int) -> None:
        """Do what a program may do between two microbatches."""

    def step(self, step: int) -> None:
        """Train on one window."""
        windows = []
        for valid in (3, 2):
            labels = torch.randint(5, (4,), generator=self.batches)
            labels[valid:] = IGNORED
            windows.append((torch.randn(4, 6, generator=self.batches), labels))
        for number, (rows, labels) in enumerate(windows):
            self.losses(rows, labels, 5).backward()
            self.accumulated(number)
        self.clip()
        self.update(step)
        self.cleared()

    def cleared(self) -> None:
        """Let go of the window's gradients."""
        self.model.zero_grad()


def recorded(folder: Path, run: Run, *, steps: int = STEPS) -> Path:
    """Record some steps of a run and return the trace."""
    with tracer.record(folder, min_free="0"):
        for step in range(steps):
            run.step(step)
    return folder
