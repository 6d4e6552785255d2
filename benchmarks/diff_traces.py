"""Two traces of a training step as large as asked, for benchmarks/diff_speed.py: written, not trained.

The tensors are those of a transformer in bfloat16 autocast with float32 weights: many of 0.1 to 4 MB, a few
of 64 MB; the second run's differ from the first's by round-off, so that every one of them is compared and
none diverges. Updates are AdamW's own, since the diff recomputes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.tracer import layout
from tensortrace.tracer.codec import Compress
from tensortrace.tracer.manifest import finish_manifest, write_manifest_new
from tensortrace.tracer.types import ROOT, Boundary, Kind, Manifest, Meta, RankManifest
from tensortrace.tracer.writer import RankWriter

ROWS, POSITIONS, WIDTH = 8, 128, 1024
VOCABULARY = 16384
SMALL_VOCABULARY = 1024
CLIP = 0.5
"""The coefficient by which gradients are clipped."""

HYPERS = {"lr": 1e-3, "betas.0": 0.9, "betas.1": 0.95, "eps": 1e-8, "weight_decay": 0.1}
HYPERS |= {"amsgrad": 0.0, "maximize": 0.0}
ROUND_OFF = {"float32": 5e-8, "bfloat16": 1e-3}
F32 = np.float32


class Run:
    """Writes one run; ``noise`` seeds by what it differs from the run without noise, 0 for that run."""

    def __init__(
        self, root: Path, *, layers: int, noise: int, compress: Compress, vocabulary: int = VOCABULARY
    ) -> None:
        root.mkdir(parents=True)
        self.vocabulary = vocabulary
        self.root, self.layers, self.noise = root, layers, noise
        self.manifest = Manifest(format=1, run_id=root.name, command=("train.py",), started_at=0.0)
        write_manifest_new(root / layout.MANIFEST, self.manifest)
        self.writer = RankWriter(root, 0, compress=compress)
        self.raw_bytes = 0
        self._event = -1

    def write(self, steps: int) -> int:
        """Write all steps and return the bytes of tensors in them."""
        own = Meta(optimizer="AdamW")
        state: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for step in range(steps):
            self._pass(step)
            for name, shape in self._weights():
                gradient = self._normal(step, name, shape, 1e-3)
                self._put(step, 0, Kind.LOCAL_GRAD, name, "grad", gradient)
                self._put(step, None, Kind.LOCAL_GRAD, name, "grad", gradient)
                self._put(step, 0, Kind.CLIPPED_GRAD, name, "before", gradient)
                clipped = gradient * F32(CLIP)
                self._put(step, None, Kind.CLIPPED_GRAD, name, "grad", clipped)
                zeros = np.zeros(shape, F32)
                before = state.pop(name, (self._start(name, shape), zeros, zeros))
                state[name] = _adamw(step + 1, clipped, *before)
                del before, gradient
                param, average, squares = state[name]
                for slot, value in (("exp_avg", average), ("exp_avg_sq", squares), ("step", F32(step + 1))):
                    self._put(step, None, Kind.OPTIMIZER_STATE, name, slot, np.asarray(value), meta=own)
                self._put(step, None, Kind.PARAM, name, "model", param, meta=Meta(requires_grad=True))
            self._scalars(step, own)
            self.writer.end_step()
        self._finish(steps)
        return self.raw_bytes

    def _pass(self, step: int) -> None:
        ids = np.random.default_rng(step).integers(1, self.vocabulary, (ROWS, POSITIONS))
        before = self._put(step, 0, Kind.INPUT, ROOT, "in.0", ids)
        wide = (ROWS, POSITIONS, WIDTH)
        for layer in range(self.layers):
            for part, dtype in (("norm", "float32"), ("up", "bfloat16"), ("act", "bfloat16")):
                name = f"layers.{layer}.{part}"
                value = self._normal(step, name, wide, 1.0, ROUND_OFF[dtype])
                before = self._put(step, 0, Kind.ACTIVATION, name, "out", value, dtype, producers=(before,))
        logits = self._normal(step, "head", (ROWS, POSITIONS, self.vocabulary), 1.0)
        before = self._put(step, 0, Kind.ACTIVATION, "head", "out", logits, producers=(before,))
        self._loss(step, before)
        gradient = self._normal(step, "head.grad", (ROWS, POSITIONS, self.vocabulary), 1e-6)
        self._put(step, 0, Kind.ACTIVATION_GRAD, "head", "out", gradient)
        for layer in reversed(range(self.layers)):
            for part, dtype in (("act", "bfloat16"), ("up", "bfloat16"), ("norm", "float32")):
                name = f"layers.{layer}.{part}"
                value = self._normal(step, f"{name}.grad", wide, 1e-6, ROUND_OFF[dtype])
                self._put(step, 0, Kind.ACTIVATION_GRAD, name, "out", value, dtype)

    def _loss(self, step: int, logits: int) -> None:
        count = ROWS * POSITIONS
        targets = np.random.default_rng(step + 1).integers(1, self.vocabulary, count)
        meta = Meta(reduction="sum", ignore_index=-100, denominator=1.0)
        found: tuple[tuple[str, Any], ...] = (
            ("target", targets), ("value", F32(9.7 * count)), ("sum", np.float64(9.7 * count)),
            ("count", np.int64(count)), ("weight", np.float64(1 / count)),
        )  # fmt: skip
        for slot, value in found:
            made = (logits,) if slot in ("value", "sum") else ()
            self._put(step, 0, Kind.LOSS, "cross_entropy", slot, np.asarray(value), meta=meta, producers=made)
        self._put(step, 0, Kind.LOSS, "backward", "value", np.asarray(F32(9.7)), producers=(self._event - 4,))

    def _scalars(self, step: int, own: Meta) -> None:
        members = tuple(name for name, _ in self._weights())
        clip = {"total_norm": 1.0 / CLIP, "max_norm": 1.0, "norm_type": 2.0, "coefficient": CLIP}
        for slot, number in clip.items():
            meta = Meta(members=members, op="clip_grad_norm_")
            self._put(step, 0, Kind.CLIPPED_GRAD, "(clip)", slot, np.float64(number), meta=meta)
        group = Meta(members=members, optimizer="AdamW")
        for slot, number in HYPERS.items():
            where = Kind.SCHEDULE, "optimizer.0.group.0", slot
            self._put(step, None, *where, np.float64(number), meta=group)
        self._put(step, None, Kind.SCHEDULE, "optimizer.0", "skipped", np.int64(0), meta=own)

    def _weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer in range(self.layers):
            yield f"layers.{layer}.up.weight", (WIDTH, WIDTH)
            yield f"layers.{layer}.norm.weight", (WIDTH,)
        yield "head.weight", (self.vocabulary, WIDTH)

    def _start(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        return _draw((7, *name.encode()), shape, 0.02)

    def _normal(
        self, step: int, name: str, shape: tuple[int, ...], scale: float, noise: float = 5e-8
    ) -> np.ndarray:
        """Return what a run has of a tensor: the same in all runs, but for relative ``noise``."""
        value = _draw((step, *name.encode()), shape, scale)
        if not self.noise:
            return value
        return value * (F32(1) + _draw((self.noise, step, *name.encode()), shape, noise))

    def _put(
        self, step: int, microbatch: int | None, kind: Kind, name: str, slot: str, value: np.ndarray,
        dtype: str = "", **fields: Any,
    ) -> int:  # fmt: skip
        self._event += 1
        dtype = dtype or str(value.dtype)
        if dtype == "bfloat16":
            bits = value.view("<u4").astype("<u8")
            value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
        boundary = Boundary(
            event=self._event, step=step, microbatch=microbatch, kind=kind, name=name, slot=slot,
            dtype=dtype, local_shape=value.shape, **fields,
        )  # fmt: skip
        self.writer.append(boundary, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        self.raw_bytes += value.nbytes
        return self._event

    def _finish(self, steps: int) -> None:
        absent = {"reduced_grad": "no reduction across ranks was seen", "unscaled_grad": "no scaler"}
        ended = RankManifest(
            format=1, rank=0, world_size=1, steps=steps, absent=absent, ended="finished"
        )  # fmt: skip
        self.writer.write_manifest(ended)
        self.writer.close()
        fields = {name: getattr(self.manifest, name) for name in Manifest.__struct_fields__}
        fields |= {"ranks": (layout.rank_folder(self.root, 0).name,), "exit_code": 0, "ended_at": 1.0}
        finish_manifest(self.root / layout.MANIFEST, Manifest(**fields))


def _draw(seed: tuple[int, ...], shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Return normal numbers that depend on nothing but the seed; of large tensors parts repeat, rolled."""
    size = math.prod(shape)
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(min(size, 1 << 18), F32) * F32(scale)
    turns = [np.roll(base, int(n)) for n in rng.integers(0, base.size, -(-size // base.size) - 1)]
    return np.concatenate([base, *turns])[:size].reshape(shape)


def _adamw(
    count: int, gradient: np.ndarray, param: np.ndarray, average: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parameter and moments after an update, in the order of torch's single-tensor AdamW."""
    rate, first, second = HYPERS["lr"], HYPERS["betas.0"], HYPERS["betas.1"]
    average = average + F32(1 - first) * (gradient - average)
    squares = F32(second) * squares + F32(1 - second) * gradient * gradient
    scale = np.sqrt(squares) / F32(math.sqrt(1 - second**count)) + F32(HYPERS["eps"])
    kept = param * F32(1 - rate * HYPERS["weight_decay"])
    return kept - F32(rate / (1 - first**count)) * (average / scale), average, squares
