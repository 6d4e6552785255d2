"""``zstd -d`` on a segment gives a safetensors file that the library opens."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tensortrace.tracer.types import Kind, Placement, Shard
from tests.synthetic import write_trace

pytestmark = pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd command")

RNG = np.random.default_rng(7)
SHARD = Shard(mesh="ddp", coordinate=(0,), placements=(Placement("shard", dim=0),), global_shape=(128, 31))
BIG = RNG.standard_normal((64, 31)).astype("f4")
TENSORS = [
    ({"name": "a/b%", "kind": Kind.PARAM, "step": -1, "microbatch": None, "shard": SHARD}, BIG),
    ({"name": "same", "slot": "in.0"}, BIG),
    ({"name": "half", "dtype": "bfloat16", "step": 2, "microbatch": 1}, BIG),
    ({"name": "half", "dtype": "bfloat16", "step": 2, "microbatch": 1, "recompute": True}, BIG + 1),
    ({"name": "small"}, np.array([1.5, np.nan], "f4")),
    ({"name": "scalar", "call": 3}, np.float64(2.5)),
    ({"name": "empty"}, np.zeros((0, 3), "i8")),
    ({"name": "mask"}, np.array([True, False])),
    ({"name": "fp8", "dtype": "float8_e4m3fn"}, np.arange(256, dtype="u1")),
    ({"name": "c", "dtype": "complex128"}, np.array([1 + 2j, 3j])),
    ({"name": "small"}, np.array([2.5], "f4")),  # the same key again
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_trace(tmp_path_factory.mktemp("segment") / "t", [TENSORS])
    segment = root / "rank00000" / "seg000000.safetensors.zst"
    out = root / "segment.safetensors"
    subprocess.run(["zstd", "-q", "-t", str(segment)], check=True)
    subprocess.run(["zstd", "-q", "-d", str(segment), "-o", str(out)], check=True)
    return out


def test_tensors_stand_under_their_boundary_names(plain: Path) -> None:
    with safe_open(plain, "pt") as file:
        assert sorted(file.keys()) == [
            "0/0/activation/c/out/0",
            "0/0/activation/empty/out/0",
            "0/0/activation/fp8/out/0",
            "0/0/activation/mask/out/0",
            "0/0/activation/scalar/out/3",
            "0/0/activation/small/out/0",
            "0/0/activation/small/out/0#10",
            "2/1/activation/half/out/0",
            "2/1/activation/half/out/0+recompute",
            "init/-/param/a%2Fb%25/out/0",
        ]


def test_ordinary_tensors_are_as_recorded(plain: Path) -> None:
    with safe_open(plain, "pt") as file:
        scalar = file.get_tensor("0/0/activation/scalar/out/3")
        assert (scalar.dtype, scalar.shape, scalar.item()) == (torch.float64, (), 2.5)
        assert file.get_tensor("0/0/activation/mask/out/0").tolist() == [True, False]
        assert file.get_tensor("0/0/activation/empty/out/0").shape == (0, 3)
        fp8 = file.get_tensor("0/0/activation/fp8/out/0")
        assert fp8.dtype == torch.float8_e4m3fn
        assert fp8.view(torch.uint8).tolist() == list(range(256))
        assert file.get_tensor("0/0/activation/small/out/0#10").tolist() == [2.5]


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("init/-/param/a%2Fb%25/out/0", "<f4", BIG),
        ("0/0/activation/c/out/0", "<c16", np.array([1 + 2j, 3j])),
        ("2/1/activation/half/out/0", "<u2", torch.from_numpy(BIG).bfloat16().view(torch.uint16).numpy()),
    ],
)
def test_byte_planes_are_restored_by_the_documented_line(
    plain: Path, name: str, dtype: str, expected: np.ndarray
) -> None:
    with safe_open(plain, "np") as file:
        planes = file.get_tensor(name)
        assert json.loads(file.metadata()[name])["codec"] == "planes"
    restored = np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view(dtype)[..., 0]
    np.testing.assert_array_equal(restored, expected)


def test_metadata_gives_each_boundarys_event_dtype_shard_and_alias(plain: Path) -> None:
    with safe_open(plain, "np") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
    assert (metadata["tensortrace.format"], metadata["tensortrace.rank"]) == (1, 0)
    first = metadata["init/-/param/a%2Fb%25/out/0"]
    assert first == {
        "event": 0,
        "dtype": "float32",
        "shape": [64, 31],
        "codec": "planes",
        "shard": {
            "mesh": "ddp",
            "coordinate": [0],
            "placements": [{"kind": "shard", "dim": 0}],
            "global_shape": [128, 31],
        },
    }
    alias = metadata["0/0/activation/same/in.0/0"]
    assert alias == {"event": 1, "dtype": "float32", "shape": [64, 31], "same_as": 0}
    assert len(metadata) == len(TENSORS) + 3
