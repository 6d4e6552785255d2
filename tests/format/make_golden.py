"""Write the golden traces of a format version.

``python -m tests.format.make_golden tests/format/golden/v2``, from the root of the repository. A golden
trace is written once, when a format version is released, and never again: what it proves is that later
readers still read it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tensortrace.tracer import writer as writer_module
from tensortrace.tracer.codec_dtypes import DTYPES, dtype_of
from tensortrace.tracer.flight import FlightStore
from tensortrace.tracer.types import Box, Kind, LevelRule, Mesh, Meta, Placement, Promise, RankManifest, Shard
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import Tensor, boundary_of, logical_bytes, write_trace

MESHES = {"dp_tp": Mesh(("dp", "tp"), (1, 2), (0, 1))}


def codes(dtype: str) -> np.ndarray:
    """Return 600 elements of a dtype whose bytes follow a rule, as its storage form."""
    size = 600 * dtype_of(dtype).itemsize
    pattern = (np.arange(size) * 7 % 251).astype("u1")
    return pattern % 2 if dtype == "bool" else pattern


def tensors(rank: int) -> list[Tensor]:
    """Return what rank ``rank`` of the golden trace holds."""
    shard = Shard(
        mesh="dp_tp",
        coordinate=(0, rank),
        placements=(Placement("replicate"), Placement("shard", dim=0)),
        global_shape=(90, 40),
        boxes=(Box((45 * rank, 0), (45, 40)),),
    )
    weight = (np.arange(1800, dtype="f4") * np.float32(0.25) + rank).reshape(45, 40)
    window: dict[str, Any] = {"microbatch": None, "name": "fc.weight"}
    found: list[Tensor] = [
        (window | {"step": -1, "kind": Kind.PARAM, "slot": "model", "shard": shard}, weight),
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, np.arange(12).reshape(3, 4)),
        (
            {"name": "fc", "producers": (1,), "meta": Meta(module="Linear", source="train.py:7")},
            weight[:2] * 2,
        ),
        ({"name": "fc", "recompute": True}, weight[:2] * 2),
        (window | {"kind": Kind.LOCAL_GRAD, "slot": "grad", "shard": shard}, weight * 0),
        (window | {"kind": Kind.PARAM, "slot": "model", "shard": shard}, weight),
        ({"kind": Kind.LOSS, "name": "backward", "slot": "value"}, np.float32(np.nan)),
        ({"name": "odd/%name é"}, np.zeros((0, 5), "f2")),
    ]
    for dtype in DTYPES:
        array = codes(dtype)
        if dtype_of(dtype).itemsize > 1:
            array = array.view({2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}[dtype_of(dtype).itemsize])
        found.append(
            ({"step": 1, "name": dtype, "dtype": dtype, "local_shape": (30, 20)}, array.reshape(30, 20))
        )
    return found


def operations() -> list[Tensor]:
    """Return what version 2 added: operations inside a module, and their gradients."""
    own: dict[str, Any] = {"kind": Kind.OPERATION, "name": "blocks.1.attn"}
    given = Meta(op="aten.mul.Tensor", source="attention.py:41", text="attend", module="blocks.1.attn")
    made = msgspec.structs.replace(
        given, arguments=("self=00000.mul.in.0 float32[2,3]", "other=0.125"), requires_grad=True
    )
    end = Meta(op="return", module="blocks.1.attn", arguments=("out=#0 float32[2,3]",))
    x = np.arange(6, dtype="f4").reshape(2, 3)
    return [
        (own | {"slot": "00000.mul.in.0", "meta": given}, x),
        (own | {"slot": "00000.mul.out", "meta": made, "producers": (0,)}, x / 8),
        (own | {"slot": "00001.return.none", "meta": end, "producers": (1,)}, np.zeros(0, "f4")),
        (own | {"kind": Kind.OPERATION_GRAD, "slot": "00000.mul.out"}, x + 1),
    ]


def levels(rank: int) -> list[Tensor]:
    """Return what rank ``rank`` of the golden trace of version 3 holds: sketches, statistics, and bytes."""
    own = Shard("dp_tp", (0, rank), (Placement("replicate"), Placement("shard", dim=1)), (21, 33))
    flat = Shard(
        "dp_tp", (0, rank), (Placement("replicate"), Placement("flat")), (29, 23),
        (Box((300 * rank,), (300 + 67 * rank,)),),
    )  # fmt: skip
    weight = np.cos(np.arange(21 * 33, dtype="f8")).reshape(21, 33)[:, 17 * rank : 17 + 16 * rank]
    window: dict[str, Any] = {"microbatch": None, "kind": Kind.PARAM, "slot": "model"}
    passed: dict[str, Any] = {"name": "fc", "slot": "out"}
    made = np.sin(np.arange(7 * 3 * 16, dtype="f4")).reshape(7, 3, 16)
    return [
        (window | {"name": "fc.weight", "shard": own}, weight.astype("f4")),
        (window | {"name": "flat.weight", "shard": flat}, np.arange(300 + 67 * rank) / 8),
        (window | {"name": "bias"}, np.where(np.arange(300) == 7, np.nan, np.arange(300)).astype("f4")),
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, np.arange(21).reshape(7, 3)),
        (passed, made),
        (passed | {"call": 1}, made.reshape(21, 16) * 2),
        (passed | {"kind": Kind.ACTIVATION_GRAD, "dtype": "bfloat16"}, made),
        (passed | {"kind": Kind.ACTIVATION_GRAD, "slot": "in.0"}, made),
        (passed | {"kind": Kind.LOCAL_GRAD, "microbatch": None}, weight.astype("f4")),
    ]


def last_steps(root: Path) -> None:
    """Write what version 4 added: a rank that kept two steps up to a NaN in the third of four."""
    promise = Promise(keep_last=2, triggers=("nonfinite",))
    store = FlightStore(RankWriter(root, 0), promise, rank=0, listener=None, on_end=lambda: None)
    for step in range(4):
        weight = np.full((2, 3), np.nan if step == 2 else step, "f4")
        for event, slot in enumerate(("model", "again")):
            boundary = boundary_of(
                2 * step + event, weight, step=step, microbatch=None, kind=Kind.PARAM, name="w", slot=slot
            )
            store.append(boundary, logical_bytes(weight, "float32"))
        store.end_step()
        store.write_manifest(RankManifest(format=4, rank=0, world_size=1, promise=promise, ended="finished"))
    store.close()


def copied(rank: int) -> Tensor:
    """Return what version 4 added: a gradient of which rank 0 stores the bytes for rank 1, too."""
    shard = Shard("ddp", (rank,), (Placement("replicate"),), (2, 3))
    fields = {"kind": Kind.REDUCED_GRAD, "name": "w", "slot": "grad", "microbatch": None, "shard": shard}
    return fields, np.arange(6, dtype="f4").reshape(2, 3)


def main(root: Path) -> None:
    """Write the trace of a version: of 1 also one of two ranks as a killed rank leaves it."""
    writer_module.RESERVED_BYTES = 12 << 10
    if root.name == "v4":
        last_steps(root / "window")
        meshes = {"ddp": Mesh(("dp",), (2,), (0, 1))}
        ranks = [[copied(rank)] for rank in (0, 1)]
        write_trace(root / "copies", ranks, meshes=meshes, promise=Promise(dedup_replicas=True))
        return
    if root.name == "v3":
        rules = (LevelRule("stats", (Kind.LOCAL_GRAD,)), LevelRule("full", (), ((1, 5),)))
        promise = Promise(level="sketch", levels=rules)
        write_trace(root / "levels", [levels(0), levels(1)], meshes=MESHES, promise=promise)
        return
    if root.name != "v1":
        promise = Promise(zoom=("blocks.1.attn",), zoom_steps=((0, 0),))
        write_trace(root / "finished", [operations()], promise=promise)
        return
    write_trace(root / "finished", [tensors(0), tensors(1)], meshes=MESHES, absent={"clipped_grad": "none"})
    write_trace(root / "killed", [tensors(0)], finish=False)
    index = root / "killed" / "rank00000" / "index.jsonl.part"
    index.write_bytes(index.read_bytes()[:-9])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
