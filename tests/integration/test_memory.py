"""A diff of tensors larger than its budget stays within it: measured as the peak of its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer import layout
from tensortrace.tracer.manifest import finish_manifest, write_manifest_new
from tensortrace.tracer.types import INIT_STEP, Kind, Manifest, Mesh, Meta, Placement, RankManifest, Shard
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of

DIFF = """
import json, sys
from pathlib import Path
from tensortrace.diff.engine import compare
result = compare(Path(sys.argv[1]), Path(sys.argv[2]))
status = Path("/proc/self/status").read_text()
peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
first = result.first_divergent
print(json.dumps({
    "verdict": result.verdict, "peak_mib": int(peak) / 1024, "headline": result.headline,
    "at": first and [first.where.step, first.where.kind, first.where.name, first.metrics.max_abs_at],
    "shape": first and first.shape, "causes": [c.code for c in result.causes],
    "compared": result.coverage.by_kind,
}))
"""
RATE, MOMENTUM = np.float32(0.125), np.float32(0.5)

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")


@dataclass(frozen=True)
class Side:
    """One run of SGD on one weight of equal rows, held in chunks of a dimension by some ranks.

    ``ulps`` sets the gradient off by that many units of round-off; ``wrong`` is an element of the
    updated weight that is off by one; ``whole_step`` tells whether gradients and moments are recorded too.
    """

    shape: tuple[int, int]
    ranks: int
    dim: int
    ulps: int = 0
    wrong: tuple[int, int] | None = None
    scale: float = 1.0
    whole_step: bool = True

    def write(self, root: Path) -> Path:
        """Write the trace; only one local tensor is held at a time."""
        folders = tuple(layout.rank_folder(root, rank).name for rank in range(self.ranks))
        manifest = Manifest(
            format=layout.FORMAT_VERSION, run_id="synthetic", command=(), started_at=0.0, ranks=folders
        )  # fmt: skip
        root.mkdir(parents=True)
        write_manifest_new(root / layout.MANIFEST, manifest)
        finish_manifest(root / layout.MANIFEST, replace(manifest, exit_code=0, ended_at=1.0))
        for rank in range(self.ranks):
            with RankWriter(root, rank) as writer:
                for event, (fields, array) in enumerate(self.tensors(rank)):
                    boundary = boundary_of(event, array, **({"microbatch": None} | fields))
                    writer.append(boundary, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
                    del array
                mesh = Mesh(("tp",), (self.ranks,), tuple(range(self.ranks)))
                writer.write_manifest(
                    RankManifest(
                        format=layout.FORMAT_VERSION, rank=rank, world_size=self.ranks, steps=1,
                        meshes={"tp": mesh}, ended="finished",
                        absent={"reduced_grad": "one rank", "unscaled_grad": "no GradScaler was used"},
                    )
                )  # fmt: skip
        return root

    def tensors(self, rank: int) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """Yield what one rank records."""
        row = (np.arange(self.shape[1]) % 251 - 125).astype(np.float32) / 64
        grad = np.roll(row, 7) * np.float32(self.scale)
        for _ in range(self.ulps):
            grad[::3] = np.nextafter(grad[::3], np.float32(9))
        buffer = grad
        placed = {"shard": Shard("tp", (rank,), (Placement("shard", dim=self.dim),), self.shape), "name": "w"}
        state = {"kind": Kind.OPTIMIZER_STATE, "slot": "momentum_buffer", "meta": Meta(optimizer="SGD")}
        param = {"kind": Kind.PARAM, "slot": "model"}
        yield placed | param | {"step": INIT_STEP}, self._local(row, rank)
        if self.whole_step:
            yield placed | {"kind": Kind.LOCAL_GRAD, "slot": "grad", "microbatch": 0}, self._local(grad, rank)
            yield placed | {"kind": Kind.CLIPPED_GRAD, "slot": "grad"}, self._local(grad, rank)
        hypers = {"lr": RATE, "momentum": MOMENTUM, "dampening": 0.0, "nesterov": 0.0, "weight_decay": 0.0}
        meta = Meta(members=("w",), optimizer="SGD")
        for slot, value in hypers.items():
            at = {"kind": Kind.SCHEDULE, "name": "optimizer.0.group.0", "slot": slot, "meta": meta}
            yield at, np.array(value, np.float64)
        if self.whole_step:
            yield placed | state, self._local(buffer, rank)
        updated = self._local(row - RATE * buffer, rank)
        if self.wrong is not None:
            at_row, column = self.wrong[0] - self._first(0, rank), self.wrong[1] - self._first(1, rank)
            if 0 <= at_row < updated.shape[0] and 0 <= column < updated.shape[1]:
                updated = updated.copy()
                updated[at_row, column] += 1
        yield placed | param, updated

    def _first(self, dim: int, rank: int) -> int:
        return rank * self.shape[dim] // self.ranks if dim == self.dim else 0

    def _local(self, row: np.ndarray, rank: int) -> np.ndarray:
        """Return this rank's chunk of the tensor whose rows are all ``row``."""
        rows, columns = (n // self.ranks if d == self.dim else n for d, n in enumerate(self.shape))
        first = self._first(1, rank)
        return np.broadcast_to(row[first : first + columns], (rows, columns))


def diff(a: Path, b: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", DIFF, str(a), str(b)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


BUDGET_MIB = 448
LARGE = (4096, 16384)  # 256 MiB of float32
RUNGS = (1536, 16384)  # 96 MiB in each of four rungs, some in float64 if they were held


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Side(RUNGS, ranks=2, dim=0).write(tmp_path_factory.mktemp("memory") / "a")


def test_every_rung_of_a_large_tensor_is_compared_in_bounded_memory(reference: Path, tmp_path: Path) -> None:
    found = diff(reference, Side(RUNGS, ranks=4, dim=1, ulps=1).write(tmp_path / "b"))
    assert found["verdict"] == "equivalent", found
    assert {"local_grad", "clipped_grad", "optimizer_state", "param"} <= found["compared"].keys()
    assert found["peak_mib"] < BUDGET_MIB


def test_one_wrong_element_of_a_large_tensor_is_found_where_it_is(tmp_path: Path) -> None:
    a = Side(LARGE, ranks=2, dim=0, whole_step=False).write(tmp_path / "a")
    b = Side(LARGE, ranks=4, dim=1, whole_step=False, wrong=(3210, 12345)).write(tmp_path / "b")
    found = diff(a, b)
    assert found["at"] == [0, "param", "w", [3210, 12345]]
    assert found["shape"] == list(LARGE)
    assert found["peak_mib"] < BUDGET_MIB


def test_the_cause_is_sought_in_the_block_of_the_worst_element(reference: Path, tmp_path: Path) -> None:
    # a factor that is no number of ranks
    found = diff(reference, Side(RUNGS, ranks=4, dim=1, scale=0.7).write(tmp_path / "b"))
    assert found["at"][1] in ("local_grad", "clipped_grad")
    assert found["causes"][:1] == ["scale.other"]
    assert found["peak_mib"] < BUDGET_MIB


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, (16000, 65000)])
def test_a_tensor_of_4_gib_in_shards_is_compared_under_1_gib(
    tmp_path: Path, wrong: tuple[int, int] | None
) -> None:
    shape = (16384, 65536)
    a = Side(shape, ranks=4, dim=0, whole_step=False).write(tmp_path / "a")
    b = Side(shape, ranks=4, dim=1, whole_step=False, wrong=wrong).write(tmp_path / "b")
    found = diff(a, b)
    assert found["peak_mib"] < 1024, found["peak_mib"]
    assert found["at"] == (None if wrong is None else [0, "param", "w", list(wrong)])
