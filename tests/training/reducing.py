"""Ways in which gradients meet across ranks, many recordings in one process: ``FOLDER CASE[:BUG]…``.

Each case trains one small model from the same weights on the same global batches of two microbatches, on
one rank or on several, and leaves its trace in ``FOLDER/CASE[:BUG]``. Prints one line
``CASE[:BUG] DIGEST DIGEST`` for each: of the training alone, and recorded.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tensortrace import tracer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS, MICROBATCHES, ROWS, WIDTH, CLASSES = 3, 2, 8, 6, 5


class Net(nn.Module):
    """Two layers and a head, and a head that no case uses; sizes that buckets of few bytes cut."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        if spare:
            self.spare = nn.Linear(16, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(rows)))))


class Case:
    """One training; a kind of case overrides what it does otherwise."""

    spare = False
    unequal = False  # the last step has rows for rank 0 alone
    microbatches = MICROBATCHES

    def __init__(self, bug: str) -> None:
        self.bug = bug
        self.numbers = torch.Generator().manual_seed(1)
        self.net = Net(spare=self.spare)
        self.model: nn.Module = self.net
        if WORLD > 1:
            self.wrap()
        self.optimizer = self.make_optimizer()

    def wrap(self) -> None:
        """Spread the model over the ranks."""

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches, each every ``WORLD``-th row of a global one."""
        count = ROWS // 2 if self.unequal and step == STEPS - 1 else ROWS
        found = []
        for _ in range(self.microbatches):
            rows = torch.randn(ROWS, WIDTH, generator=self.numbers)
            labels = torch.randint(0, CLASSES, (ROWS,), generator=self.numbers)
            mine = slice(RANK, None, WORLD)
            if count < ROWS and WORLD > 1:
                mine = slice(0, count) if RANK == 0 else slice(0, 0)
            elif count < ROWS:
                mine = slice(0, count)
            found.append((rows[mine], labels[mine]))
        self.total = count * self.microbatches
        return found

    def train(self) -> None:
        for step in range(STEPS):
            parts = self.batches(step)
            if len(parts[0][0]):
                self.step(parts)

    def step(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        for number, (rows, labels) in enumerate(parts):
            with self.around(last=number == len(parts) - 1):
                loss = F.cross_entropy(self.model(rows), labels, reduction="sum")
                (loss * (WORLD / self.total)).backward()
            self.after_backward(last=number == len(parts) - 1)
        self.update()

    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def after_backward(self, *, last: bool) -> None:
        """Do what follows each backward."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[Tensor]:
        yield from self.net.state_dict().values()
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        for parameter in self.net.parameters() if optimizer is not None else ():
            held = optimizer.state.get(parameter, {})
            yield from (held[name] for name in sorted(held) if isinstance(held[name], Tensor))


class Ddp(Case):
    """Reduces at the last microbatch alone."""

    settings: ClassVar[dict[str, object]] = {}

    def wrap(self) -> None:
        self.model = DistributedDataParallel(self.net, **self.settings)

    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if WORLD > 1 and (not last or self.bug == "quiet"):
            return self.model.no_sync()
        return contextlib.nullcontext()


class EverySync(Ddp):
    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Views(Ddp):
    settings: ClassVar = {"gradient_as_bucket_view": True}


class Static(EverySync):
    settings: ClassVar = {"static_graph": True}


class Unused(Ddp):
    spare = True
    settings: ClassVar = {"find_unused_parameters": True}


class Buckets(Ddp):
    settings: ClassVar = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}


class Hooked(Ddp):
    """A communication hook of torch's."""

    hook = staticmethod(default_hooks.allreduce_hook)

    def wrap(self) -> None:
        super().wrap()
        self.model.register_comm_hook(None, self.hook)


class Fp16(Hooked):
    hook = staticmethod(default_hooks.fp16_compress_hook)


def own_hook(state, bucket):  # DDP refuses annotations that are strings
    buffer = bucket.buffer()
    buffer.div_(WORLD * (WORLD if state.bug == "twice" else 1))
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class OwnHook(Ddp):
    def wrap(self) -> None:
        super().wrap()
        self.model.register_comm_hook(self, own_hook)


class PowerSgd(Ddp):
    def wrap(self) -> None:
        super().wrap()
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        self.model.register_comm_hook(state, powersgd.powerSGD_hook)


class Joined(Ddp):
    """Rank 0 has a step more than the others.

    With the bug it reduces after each microbatch: in the last step it adds to what the ranks that have
    joined give no part of, and the average is another.
    """

    unequal = True

    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.bug == "every" else super().around(last=last)

    def train(self) -> None:
        with self.model.join() if WORLD > 1 else contextlib.nullcontext():
            super().train()


class Zero(Ddp):
    def make_optimizer(self) -> torch.optim.Optimizer:
        if WORLD == 1:
            return super().make_optimizer()
        return ZeroRedundancyOptimizer(
            self.net.parameters(), torch.optim.AdamW, lr=1e-2, parameters_as_bucket_view=True
        )


class FusedOptimizer(EverySync):
    """DDP runs an optimizer for each parameter inside its hook, in each backward."""

    microbatches = 1

    def wrap(self) -> None:
        super().wrap()
        self.model._register_fused_optim(torch.optim.AdamW, lr=1e-2)

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        return super().make_optimizer() if WORLD == 1 else None

    def update(self) -> None:
        if WORLD == 1:
            super().update()
        self.model.zero_grad()


class ByHand(Case):
    """Averages each gradient over the ranks before the update."""

    def graded(self) -> list[nn.Parameter]:
        left_out = self.net.second.weight if self.bug == "left-out" else None
        return [p for p in self.net.parameters() if p.grad is not None and p is not left_out]

    def after_backward(self, *, last: bool) -> None:
        if WORLD > 1 and last == (self.bug != "early"):
            self.reduce()

    def reduce(self) -> None:
        for parameter in self.graded():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD


class Scattered(ByHand):
    """Starts every reduction, then waits for all."""

    def reduce(self) -> None:
        works = [dist.all_reduce(parameter.grad.div_(WORLD), async_op=True) for parameter in self.graded()]
        for work in works:
            work.wait()


class Flattened(ByHand):
    """Reduces copies in one buffer, and copies back."""

    def reduce(self) -> None:
        grads = [parameter.grad for parameter in self.graded()]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat /= WORLD
        for grad, new in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(new)


class FlatViews(ByHand):
    """Gradients are views of one buffer, which is reduced."""

    def reduce(self) -> None:
        dist.all_reduce(self.flat)
        self.flat /= WORLD

    def step(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        parameters = list(self.net.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        pieces = self.flat.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        super().step(parts)


class InHooks(ByHand):
    """Each parameter's gradient is reduced as soon as it has arrived."""

    def wrap(self) -> None:
        self.last = False
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter: nn.Parameter) -> None:
        if self.last:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD

    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        self.last = last
        return contextlib.nullcontext()

    def after_backward(self, *, last: bool) -> None:
        pass


class InBackward(Case):
    """The last backward reduces and updates each parameter as soon as its gradient has arrived."""

    def __init__(self, bug: str) -> None:
        super().__init__(bug)
        self.last = False
        self.own = {p: torch.optim.AdamW([p], lr=1e-2) for p in self.net.parameters()}
        for parameter in self.own:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def make_optimizer(self) -> None:
        return None

    def around(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        self.last = last
        return contextlib.nullcontext()

    def arrived(self, parameter: nn.Parameter) -> None:
        if not self.last:
            return
        if WORLD > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD
        self.own[parameter].step()
        self.own[parameter].zero_grad()

    def update(self) -> None:
        pass

    def tensors(self) -> Iterator[Tensor]:
        yield from self.net.state_dict().values()
        for parameter, optimizer in self.own.items():
            yield from optimizer.state[parameter].values()


class Sgd(ByHand):
    """What ``Descent`` does, by an optimizer."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Descent(ByHand):
    """Updates parameters without an optimizer."""

    def make_optimizer(self) -> None:
        return None

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.net.parameters():
            parameter.data.add_(parameter.grad, alpha=-(0.2 if self.bug == "rate" else 0.1))
            parameter.grad = None


class Rebinding(Descent):
    """The same with new data in place of the old."""

    def update(self) -> None:
        for parameter in self.net.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
        self.net.zero_grad()


class Subtracting(Descent):
    """The same with ``-=`` and gradients that are zeroed in place."""

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()


CASES: dict[str, Callable[[str], Case]] = {
    "ddp": Ddp, "every": EverySync, "views": Views, "static": Static, "unused": Unused, "buckets": Buckets,
    "hooked": Hooked, "fp16": Fp16, "own": OwnHook, "powersgd": PowerSgd,
    "joined": Joined, "zero": Zero, "fused": FusedOptimizer, "hand": ByHand, "scattered": Scattered,
    "flattened": Flattened, "flat-views": FlatViews, "in-hooks": InHooks, "in-backward": InBackward,
    "descent": Descent, "sgd": Sgd, "rebinding": Rebinding, "subtracting": Subtracting,
}  # fmt: skip


def run(name: str) -> str:
    case, _, bug = name.partition(":")
    torch.manual_seed(0)
    training = CASES[case](bug)
    training.train()
    total = hashlib.sha256()
    for tensor in (*training.tensors(), torch.get_rng_state()):
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    if WORLD > 1:
        dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        try:
            alone = run(name)
            gc.collect()
            with tracer.record(folder / name, min_free="0", buffer="64MiB"):
                recorded = run(name)
        except Exception:
            traceback.print_exc()
            alone, recorded = "failed", "failed"
        gc.collect()  # a DDP module that outlives its group may abort at exit
        told = f"{name} {alone} {recorded}\n"
        os.write(1, told.encode())  # ranks share the pipe
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
