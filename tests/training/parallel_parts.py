"""What every layout answers, with the answers of a single rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_model import Decoder
from parallel_rows import IGNORE, Batch
from parallel_settings import Settings
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

WRAPPERS = ("module.", "_fsdp_wrapped_module.")


class Layout:
    """One rank's part of a training; a layout overrides what differs from a single rank.

    ``part`` of ``parts`` says which rows of the batch this rank reads; ``factor`` undoes what the wrapper
    divides gradients by.
    """

    part, parts, factor = 0, 1, 1

    def __init__(self, model: Decoder, options: argparse.Namespace) -> None:
        self.options = options
        self.plant: str = options.plant
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.settings = Settings(options)
        self.settings.prepare(model)
        self.whole = model
        self.model: nn.Module = model
        self.wrap(model)

    def wrap(self, model: Decoder) -> None:
        """Spread the model over the ranks."""

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of what this rank holds, names as in the whole model."""
        for name, parameter in self.model.named_parameters():
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            yield name, parameter

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return self.settings.optimizer(self.parameters(), rate)

    def padded(self, batch: Batch) -> Batch:
        return batch

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def backward(self, batch: Batch, total: int) -> Tensor:
        """Run forward and backward over this rank's rows; return its loss sum."""
        done = torch.zeros(())
        for part in batch.chunks(self.options.microbatches) if self.options.microbatches > 1 else [batch]:
            with self.settings.forward():
                loss = self.loss(self.model(part.tokens), part.targets)
            self.settings.scaler.scale(loss * (self.factor / total)).backward()
            done = done + loss.detach()
        return done

    def summed(self, loss: Tensor) -> float:
        """Return the loss sum over all ranks' rows."""
        if self.parts > 1:
            loss = loss.double() / (self.world // self.parts)
            dist.all_reduce(loss)
        return float(loss)

    def reduce(self) -> None:
        """Reduce gradients that no wrapper reduces."""

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def clip_together(self, max_norm: float, owned: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Clip by the norm over all ranks of the group; each parameter is ``owned`` by one of them."""
        square = full(get_total_norm([p.grad for p in owned if p.grad is not None])).square()
        dist.all_reduce(square, group=group)
        clip_grads_with_norm_(self.parameters(), max_norm, square.sqrt())

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.settings.step(optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Return the global weights, from whichever ranks hold them; raises where copies disagree."""
        mine = {name: full(tensor).detach().clone() for name, tensor in self.named()}
        if self.world == 1 or not dist.is_initialized():
            return mine
        everywhere: list[dict[str, Tensor]] = [{}] * self.world
        dist.all_gather_object(everywhere, mine)
        merged: dict[str, Tensor] = {}
        for held in everywhere:
            for name, value in held.items():
                other = merged.setdefault(name, value)
                if not self.plant and not torch.equal(other, value):
                    raise AssertionError(f"copies of {name} disagree")
        return merged


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
