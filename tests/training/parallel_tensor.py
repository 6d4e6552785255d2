"""Tensor parallelism through DTensor, with and without sequence parallelism, and under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from parallel_model import Decoder
from parallel_parts import Layout, full
from parallel_replicas import FSDP2
from parallel_rows import Batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARIES = ("token.weight", "head.weight")


class Replicated(ParallelStyle):
    """Parameters and inputs are copies; the output is laid out as asked and handed on as local tensors.

    ``grads`` says how gradients of the output come back, where they are not laid out as the output is.
    """

    def __init__(self, output: Placement | None = None, grads: Placement | None = None) -> None:
        super().__init__()
        self.output = output or Replicate()
        self.grads = grads

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, mesh, None, self._enter, self._leave)

    def _enter(self, module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        def spread(x: Tensor) -> Tensor:
            return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (Replicate(),))

        return tuple(map(spread, inputs))

    def _leave(self, module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        output = output.redistribute(placements=(self.output,))
        return output.to_local(grad_placements=(self.grads,) if self.grads else None)


def plan_of(model: Decoder, sequence: bool, shared_kv: bool, plant: str) -> dict[str, ParallelStyle]:
    """Return the style of each module that the model has, by name."""
    rows = Shard(1) if sequence else Replicate()
    norm = SequenceParallel() if sequence else Replicated()
    kv_grads = None if plant == "kv-not-summed" else Partial()
    kv = Replicated(grads=kv_grads) if shared_kv else ColwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "position": Replicated(rows),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    for number in model.layers:
        layer = f"layers.{number}."
        plan |= {
            layer + "attention_norm": norm,
            layer + "attention": PrepareModuleInput(
                input_layouts=(rows, None), desired_input_layouts=(Replicate(), None)
            ),
            layer + "attention.q": ColwiseParallel(),
            layer + "attention.kv": kv,
            layer + "attention.out": RowwiseParallel(output_layouts=rows),
            layer + "mlp_norm": norm,
            layer + "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
            layer + "mlp.gate": ColwiseParallel(use_local_output=False),  # 13 features: uneven
            layer + "mlp.up": ColwiseParallel(use_local_output=False),
            layer + "mlp.down": RowwiseParallel(output_layouts=rows),
        }
    held = dict(model.named_modules())
    return {name: style for name, style in plan.items() if held.get(name) is not None}


def parallelize(model: Decoder, mesh: DeviceMesh, sequence: bool, plant: str) -> None:
    """Spread the model over the ranks of a mesh of one axis."""
    attention = next(iter(model.layers.values())).attention
    kv_heads = attention.heads // attention.queries_per_head
    shared_kv = kv_heads < mesh.size()
    parallelize_module(model, mesh, plan_of(model, sequence, shared_kv, plant))
    for layer in model.layers.values():
        if shared_kv:
            layer.attention.first_query = mesh.get_local_rank() * (attention.heads // mesh.size())
        layer.mlp.exchanged = plant == "gate-up-exchanged"
    layer = model.layers["1"] if "1" in model.layers else None
    if plant == "kv-blocks-swapped" and layer is not None:
        weight = layer.attention.kv.weight.to_local()
        with torch.no_grad():
            weight.copy_(weight.unflatten(0, (-1, 2, layer.attention.head_dim)).flip(1).flatten(0, 2))
    if layer is not None:
        layer.attention.swapped = plant == "kv-blocks-read-swapped"
    if plant == "bias-on-every-rank" and layer is not None:
        layer.attention.out.forward = lambda x: biased_parts(layer.attention.out, x)


def biased_parts(linear: nn.Linear, x: DTensor) -> DTensor:
    """Add the bias to each rank's part of the sum, where it should be added once."""
    part = F.linear(x.to_local(), linear.weight.to_local(), linear.bias.to_local())
    return DTensor.from_local(part, x.device_mesh, (Partial(),))


def pad_vocabulary(model: Decoder, size: int) -> None:
    """Give embedding and head so many rows; no token and no target uses the new ones."""
    for module in (model.token, model.head):
        rows = module.weight.detach()
        module.weight = nn.Parameter(F.pad(rows, (0, 0, 0, size - len(rows))))


class TP(Layout):
    sequence = False

    def wrap(self, model: Decoder) -> None:
        self.mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        if self.options.pad_vocabulary:
            pad_vocabulary(model, self.options.pad_vocabulary)
        parallelize(model, self.mesh, self.sequence, self.plant)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        seen = logits.shape[-1] if self.plant == "loss-over-padding" else self.options.vocabulary
        return super().loss(logits[..., :seen], targets)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().named():
            yield name, full(tensor)[: self.options.vocabulary] if name in VOCABULARIES else tensor

    def reduce(self) -> None:
        if self.plant == "norm-grads-not-reduced":
            forget_partial(self.model)


class TPSP(TP):
    """Between blocks each rank holds a part of the positions."""

    sequence = True

    def padded(self, batch: Batch) -> Batch:
        return batch.padded(-(-batch.tokens.shape[1] // self.world) * self.world)


class FSDP2TP(FSDP2):
    """Two ranks share each tensor, the others are sharded data parallel."""

    def wrap_data(self, model: Decoder) -> None:
        pair = 2
        mesh = init_device_mesh("cpu", (self.world // pair, pair), mesh_dim_names=("dp", "tp"))
        self.part, self.parts, self.factor = mesh["dp"].get_local_rank(), mesh["dp"].size(), mesh["dp"].size()
        parallelize(model, mesh["tp"], False, self.plant)
        self.shard(model, mesh["dp"])


def forget_partial(model: nn.Module) -> None:
    """Take each rank's part of a norm's gradient for the whole."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            local = gradient.to_local()
            parameter.grad = DTensor.from_local(local, gradient.device_mesh, (Replicate(),), run_check=False)
