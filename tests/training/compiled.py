"""A small residual model, compiled or not, on one rank or spread: ``python compiled.py FOLDER CASE…``.

A case is LAYOUT:WHERE: ``blocks`` compiles each block in place, ``outside`` the whole model after it was
spread, ``inside`` before, ``eager`` nothing. With FOLDER ``-`` nothing is recorded, else each case is, in
FOLDER/CASE. Rank 0 prints, for each, one line of JSON: the digest of losses and weights, the graphs that were
compiled, and why graphs broke.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tensortrace import tracer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Compiler:
    """Compiles to what eager mode runs, and keeps the operations of each graph."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        nodes = (node.target for node in graph.graph.nodes if node.op.startswith("call"))
        self.graphs.append([getattr(target, "__name__", str(target)) for target in nodes])
        return graph.forward

    def blocks(self, model: Model) -> None:
        for block in model.blocks:
            block.compile(backend=self)


def spread(model: Model, layout: str) -> nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if layout == "tp":
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def train(layout: str, where: str) -> dict[str, object]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    compiler, whole = Compiler(), Model()
    if where == "blocks":
        compiler.blocks(whole)
    inner = torch.compile(whole, backend=compiler) if where == "inside" else whole
    model = spread(inner, layout)
    model = torch.compile(model, backend=compiler) if where == "outside" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    numbers, told = torch.Generator().manual_seed(1), hashlib.sha256()
    for _ in range(STEPS):
        batch = torch.randint(0, 50, (2, 4, 8), generator=numbers)
        ids, labels = batch if layout == "tp" else batch[:, RANK::WORLD]
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.update(repr(loss.item()).encode())
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        told.update(local.detach().contiguous().numpy().tobytes())
    breaks = {why[:80]: n for why, n in torch._dynamo.utils.counters["graph_break"].items()}
    return {"digest": told.hexdigest(), "graphs": compiler.graphs, "breaks": breaks}


def main() -> None:
    folder, *cases = sys.argv[1:]
    if WORLD > 1:
        dist.init_process_group("gloo")
    for case in cases:
        recorded = tracer.record(Path(folder) / case, min_free="0", buffer="64MiB")
        with recorded if folder != "-" else contextlib.nullcontext():
            told = train(*case.split(":"))
        gc.collect()
        if RANK == 0:
            print(json.dumps({"case": case, **told}), flush=True)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
