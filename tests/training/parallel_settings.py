"""How a training of ``parallel.py`` saves time and memory: precision, loss scale, checkpoints, optimizers."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

BETAS = (0.9, 0.95)
FIRST_SCALE = 2.0**24  # overflows float16, so that the first step is skipped
NEXT = 2.0**-10

AUTOCAST = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
FLAGS = ("foreach", "fused")


class Lion(torch.optim.Optimizer):
    """An optimizer of the program's own: a step of constant size along the sign of an average."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["average"] = torch.zeros_like(parameter)
                    state["average"].lerp_(parameter.grad, 0.1)
                    parameter.add_(state["average"], alpha=-10 * group["lr"])


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "mixed", *AUTOCAST])
    parser.add_argument("--checkpoint", choices=["reentrant", "non-reentrant"])
    parser.add_argument("--keep-activations", choices=["cpu"], help="where what backward needs is kept")
    parser.add_argument("--offload", action="store_true", help="parameters are kept on the CPU (FSDP2)")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "own", "sgd", *FLAGS])
    parser.add_argument("--average", action="store_true", help="keep a moving average of the model")


class Settings:
    """What the options say, in the words of the training loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plant: str = options.plant
        self.unscaled = 0
        scaled = options.precision == "amp-fp16"
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=FIRST_SCALE, backoff_factor=NEXT, growth_interval=3, enabled=scaled
        )

    def prepare(self, model: Any) -> None:
        """Prepare the whole model, before it is spread."""
        if self.options.precision == "bf16":
            model.to(torch.bfloat16)
        if self.options.checkpoint:
            kind, keep = self.options.checkpoint == "reentrant", self.plant != "recomputed-anew"
            model.run = functools.partial(checkpoint, use_reentrant=kind, preserve_rng_state=keep)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward pass and its loss under the options."""
        with contextlib.ExitStack() as stack:
            if self.options.precision in AUTOCAST:
                stack.enter_context(torch.autocast("cpu", AUTOCAST[self.options.precision]))
            if self.options.keep_activations:
                stack.enter_context(torch.autograd.graph.save_on_cpu())
            yield

    def of_fully_shard(self, *, whole: bool = False) -> dict[str, object]:
        found: dict[str, object] = {}
        if self.options.precision == "mixed":
            reduce = torch.bfloat16 if self.plant == "reduced-in-bf16" else torch.float32
            out = torch.float32 if whole else None
            found["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce, output_dtype=out)
        if self.options.offload:
            found["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        return found

    def of_fsdp1(self) -> dict[str, object]:
        found: dict[str, object] = {}
        if self.options.precision == "mixed":
            reduce = torch.bfloat16 if self.plant == "reduced-in-bf16" else torch.float32
            found["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce, torch.float32)
        return found

    def optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        chosen = self.options.optimizer
        if chosen == "own":
            return Lion(parameters, rate)
        if chosen == "sgd":
            return torch.optim.SGD(parameters, rate * 10, momentum=0.9, nesterov=True)
        flags = {chosen: True} if chosen in FLAGS else {}
        return torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.1, **flags)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the loss scale out, and let all ranks know where one of them found no numbers."""
        if not self.scaler.is_enabled() or self.plant == "scaled-when-clipped":
            return
        self.scaler.unscale_(optimizer)
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        self.unscaled += 1
        for flag in found.values():
            local = flag.to_local() if isinstance(flag, DTensor) else flag
            if self.plant == "skips-alone":
                local.fill_(self.unscaled == 1 or (self.unscaled == 2 and dist.get_rank() == 1))
            elif dist.is_initialized():
                dist.all_reduce(local, op=dist.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()

    def averaged(self, layout: Any) -> AveragedModel | None:
        if not self.options.average:
            return None
        return AveragedModel(layout.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
