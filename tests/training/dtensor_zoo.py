"""Small trainings under DTensor layouts, each run without and with recording.

    torchrun --nproc-per-node 2 dtensor_zoo.py FOLDER NAME...

Every rank prints one JSON object a layout: whether losses, parameters, gradients, optimizer state and
generators are the same, bit for bit. FOLDER/NAME holds the trace, and FOLDER/NAME.npz what an unwrapped
model gives in float64: outputs and their gradients by data rank and microbatch, gradients, and parameters
after one step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tensortrace import tracer

VOCABULARY, WIDTH, HEAD_WIDTH, ROWS, LENGTH = 16, 8, 2, 3, 4
STEPS, MICROBATCHES, LR, MAX_NORM = 3, 2, 1e-2, 0.25


class Attention(nn.Module):
    """Attention over the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.mix(self.q(x), self.k(x), self.v(x)))


class Mix(nn.Module):
    """Scaled dot product of local heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for t in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / HEAD_WIDTH**0.5, -1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU()
        self.down, self.drop = nn.Linear(hidden, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Net(nn.Module):
    """A language model of two blocks."""

    def __init__(self, hidden: int = 12, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.checkpoints = False
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Layout:
    """How a model is spread; ``shape`` is (data ranks, tensor ranks), and what else a training has."""

    wrap: Callable[[Net, DeviceMesh], object]
    shape: tuple[int, int]
    hidden: int = 12
    dropout: float = 0.0
    tied: bool = False
    loss_parallel: bool = False
    no_sync: bool = False
    clips: bool = True
    checkpoints: bool = False
    scaled: bool = False
    evaluates: bool = False
    optimizer: tuple[tuple[str, bool], ...] = ()


def tensor_parallel(net: Net, mesh: DeviceMesh, *, uneven: bool = False) -> None:
    heads = () if uneven else ("q", "k", "v")
    parallelize_module(net, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    for block in net.blocks:
        plan = {"up": ColwiseParallel(use_local_output=not uneven), "down": RowwiseParallel()}
        plan |= {f"attention.{name}": ColwiseParallel() for name in heads}
        parallelize_module(block, mesh, plan | ({} if uneven else {"attention.o": RowwiseParallel()}))


def sequence_parallel(net: Net, mesh: DeviceMesh, *, last: object = None) -> None:
    head = ColwiseParallel(
        input_layouts=Shard(1), output_layouts=last or Replicate(), use_local_output=last is None
    )
    whole = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    parallelize_module(net, mesh, whole | {"norm": SequenceParallel(), "head": head})
    for block in net.blocks:
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {"norm1": SequenceParallel(), "attention": gathered, "norm2": SequenceParallel()}
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.o": RowwiseParallel(output_layouts=Shard(1))}
        plan |= {"up": ColwiseParallel(input_layouts=Shard(1))}
        plan |= {"down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, mesh, plan)


def prepared(net: Net, mesh: DeviceMesh) -> None:
    """Convert at the border of each feed-forward activation: nothing else is a DTensor."""
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        split = PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Shard(-1))
        joined = PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Shard(-1))
        parallelize_module(block, mesh, {"act": split})
        parallelize_module(block, mesh, {"act": joined})


def sharded(net: Net, mesh: DeviceMesh, **options: object) -> None:
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def both(net: Net, mesh: DeviceMesh) -> None:
    sequence_parallel(net, mesh["tp"])
    sharded(net, mesh["dp"])


def replicated_shards(net: Net, mesh: DeviceMesh) -> None:
    world = mesh.size()
    sharded(net, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))


def half(net: Net, mesh: DeviceMesh) -> None:
    sharded(net, mesh["dp"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


LAYOUTS = {
    "tp": Layout(lambda net, mesh: tensor_parallel(net, mesh["tp"]), (1, 2), clips=False),
    "tp_uneven": Layout(
        lambda net, mesh: tensor_parallel(net, mesh["tp"], uneven=True), (1, 2), hidden=13, clips=False
    ),
    "tp_uneven_4": Layout(
        lambda net, mesh: tensor_parallel(net, mesh["tp"], uneven=True), (1, 4), hidden=13, clips=False
    ),
    "prepared": Layout(lambda net, mesh: prepared(net, mesh["tp"]), (1, 2), clips=False),
    "sp": Layout(lambda net, mesh: sequence_parallel(net, mesh["tp"]), (1, 2), evaluates=True),
    "sp_loss": Layout(
        lambda net, mesh: sequence_parallel(net, mesh["tp"], last=Shard(-1)), (1, 2), loss_parallel=True,
        optimizer=(("foreach", False),),
    ),
    "fsdp": Layout(lambda net, mesh: sharded(net, mesh["dp"]), (2, 1), hidden=13),
    "fsdp_kept": Layout(
        lambda net, mesh: sharded(net, mesh["dp"], reshard_after_forward=False), (2, 1), hidden=13,
        optimizer=(("fused", True),),
    ),
    "fsdp_tied": Layout(lambda net, mesh: fully_shard(net, mesh=mesh["dp"]), (2, 1), tied=True),
    "fsdp_no_sync": Layout(lambda net, mesh: sharded(net, mesh["dp"]), (2, 1), no_sync=True),
    "fsdp_half": Layout(half, (2, 1), dropout=0.1, no_sync=True),
    "fsdp_checkpointed": Layout(lambda net, mesh: sharded(net, mesh["dp"]), (2, 1), checkpoints=True),
    "fsdp_scaled": Layout(lambda net, mesh: sharded(net, mesh["dp"]), (2, 1), scaled=True),
    "sp_checkpointed": Layout(
        lambda net, mesh: sequence_parallel(net, mesh["tp"]), (1, 2), checkpoints=True
    ),
    "hsdp": Layout(replicated_shards, (2, 1)),
    "hsdp_4": Layout(replicated_shards, (4, 1), hidden=13),
    "fsdp_tp": Layout(both, (2, 2)),
}  # fmt: skip


def model_of(layout: Layout) -> Net:
    torch.manual_seed(1)
    return Net(layout.hidden, layout.dropout, layout.tied)


def batch(step: int, microbatch: int, data: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + data)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    return ids, ids.roll(-1, 1)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()) / MICROBATCHES


def train(layout: Layout, mesh: DeviceMesh) -> str:
    """Train and return a digest of everything that was computed."""
    net, data = model_of(layout), mesh.get_coordinate()[0]
    net.checkpoints = layout.checkpoints
    layout.wrap(net, mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=layout.scaled)
    adamw = torch.optim.AdamW(net.parameters(), lr=LR, **dict(layout.optimizer))
    torch.manual_seed(7 + dist.get_rank())
    seen: list[Tensor] = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            if layout.no_sync:
                net.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            ids, targets = batch(step, microbatch, data)
            with loss_parallel() if layout.loss_parallel else contextlib.nullcontext():
                loss = loss_of(net(ids), targets)
                scaler.scale(loss).backward()
            seen.append(loss)
        scaler.unscale_(adamw)
        seen += [parameter.grad for parameter in net.parameters()]
        if layout.clips:
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM))
        seen = [torch.tensor(list(digest(seen)))]
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        if layout.evaluates:
            with torch.no_grad():
                seen.append(net(ids[:2]))
    state = [value for entry in adamw.state.values() for value in entry.values()]
    return digest([*seen, *net.parameters(), *state, torch.get_rng_state()]).hex()


def digest(tensors: list[Tensor]) -> bytes:
    total = hashlib.sha256()
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        local = local.detach().contiguous().reshape(-1)
        total.update(local.view(torch.uint8).numpy().tobytes())
    return total.digest()


def reference(layout: Layout) -> dict[str, np.ndarray]:
    """Return what the unwrapped model gives in float64 in the first step, for every data rank's rows."""
    found: dict[str, np.ndarray] = {}
    net = model_of(layout).double().eval()
    mean = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    for data in range(layout.shape[0]):
        for microbatch in range(MICROBATCHES):
            for key, value in one_pass(net, *batch(0, microbatch, data)):
                found[f"{data}/{microbatch}/{key}"] = value.numpy()
            for name, parameter in net.named_parameters():
                found[f"{data}/{microbatch}/local_grad/{name}"] = parameter.grad.numpy().copy()
                mean[name] += parameter.grad / layout.shape[0]
    norm = torch.cat([gradient.flatten() for gradient in mean.values()]).norm()
    factor = min(1.0, MAX_NORM / (norm.item() + 1e-6)) if layout.clips else 1.0
    adamw = torch.optim.AdamW(net.parameters(), lr=LR)
    for name, parameter in net.named_parameters():
        found[f"reduced_grad/{name}"], parameter.grad = mean[name].numpy().copy(), mean[name] * factor
    adamw.step()
    found |= {f"param/{name}": value.detach().numpy() for name, value in net.named_parameters()}
    return found | {"total_norm": norm.numpy(), "coefficient": np.array(factor)}


def one_pass(net: Net, ids: Tensor, targets: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield what each module is given and returns, with the gradients, after one forward and backward."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            for slot, tensor in (("in.0", given[0]), ("out", output)):
                if tensor.requires_grad:
                    tensor.retain_grad()
                    kept[f"{slot}/{name}"] = tensor

        return hook

    named = {name or "(root)": module for name, module in net.named_modules()}
    handles = [module.register_forward_hook(keep(name)) for name, module in named.items()]
    net.zero_grad()
    loss_of(net(ids), targets).backward()
    for handle in handles:
        handle.remove()
    for name, tensor in kept.items():
        yield f"activation/{name}", tensor.detach()
        yield f"activation_grad/{name}", tensor.grad


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    for name in names:
        layout = LAYOUTS[name]
        mesh = init_device_mesh("cpu", layout.shape, mesh_dim_names=("dp", "tp"))
        alone = train(layout, mesh)
        assert train(layout, mesh) == alone, "the training itself must repeat"
        with tracer.record(folder / name, min_free="0"):
            recorded = train(layout, mesh)
        if dist.get_rank() == 0:
            np.savez(folder / f"{name}.npz", **reference(layout))
        told = {"layout": name, "rank": dist.get_rank(), "same": recorded == alone}
        os.write(1, (json.dumps(told) + "\n").encode())  # ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
