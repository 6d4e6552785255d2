"""Write the golden traces of a format version.

``python -m tests.format.make_golden tests/format/golden/v1``, from the root of the repository. A golden
trace is written once, when a format version is released, and never again: what it proves is that later
readers still read it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.tracer import writer as writer_module
from tensortrace.tracer.codec_dtypes import DTYPES, dtype_of
from tensortrace.tracer.types import Box, Kind, Mesh, Meta, Placement, Shard
from tests.synthetic import Tensor, write_trace

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


def main(root: Path) -> None:
    """Write a finished trace of two ranks and, beside it, one as a killed rank leaves it."""
    writer_module.RESERVED_BYTES = 12 << 10
    write_trace(root / "finished", [tensors(0), tensors(1)], meshes=MESHES, absent={"clipped_grad": "none"})
    write_trace(root / "killed", [tensors(0)], finish=False)
    index = root / "killed" / "rank00000" / "index.jsonl.part"
    index.write_bytes(index.read_bytes()[:-9])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
