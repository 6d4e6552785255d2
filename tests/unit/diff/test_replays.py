"""The worst element of what updates do not explain, found in one pass, against two passes over the whole."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tensortrace.diff.catalog import Slot
from tensortrace.diff.compare import Sides
from tensortrace.diff.plan.replays import Block, Meter, Pieces, between
from tensortrace.diff.plan.updates import UpdateSource
from tensortrace.diff.tolerance import Unexplained, measure_unexplained
from tensortrace.tracer.types import Kind

LENGTH = 100
"""Elements of a piece."""


def in_pieces(unexplained: np.ndarray, sizes: np.ndarray, of_block: int) -> Unexplained:
    def piece(number: int, start: int) -> Sides:
        begin = number * of_block + start
        return unexplained[begin : begin + LENGTH], sizes[begin : begin + LENGTH]

    meter = Meter()
    for number in range(len(sizes) // of_block):
        for start in range(0, of_block, LENGTH):
            meter.add((number, start), piece(number, start))
    return meter.result(lambda number: lambda start: piece(number, start))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grows", [1e-6, 1.0, 1e6])
def test_one_pass_finds_what_two_passes_find(seed: int, grows: float) -> None:
    """Sizes over many orders of magnitude, which grow or shrink from block to block."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 4, 3000)) * np.repeat([1.0, grows, grows**2], 1000)
    sizes[rng.random(3000) < 0.1] = 0.0
    unexplained = rng.normal(0, 1e-7, 3000) * np.maximum(sizes, 1e-9)
    found, whole = in_pieces(unexplained, sizes, 1000), measure_unexplained([(unexplained, sizes)])
    assert found.worst == pytest.approx(whole.worst, rel=1e-12)
    assert found.squares == pytest.approx(whole.squares, rel=1e-12)


def test_a_nan_anywhere_is_infinitely_wrong_and_a_size_that_is_not_finite_counts_as_none() -> None:
    sizes, unexplained = np.ones(2000), np.full(2000, 1e-8)
    sizes[700], unexplained[1234] = np.inf, np.nan
    found = in_pieces(unexplained, sizes, 1000)
    assert found.worst == np.inf
    assert found.squares == 1999


ADAMW = {"lr": 1e-3, "betas.0": 0.9, "betas.1": 0.999, "eps": 1e-8, "weight_decay": 0.1}
LEFT = {
    Slot("train", kind, "w", slot, 0): slot
    for kind, slot in (
        (Kind.PARAM, "model"), (Kind.OPTIMIZER_STATE, "exp_avg"), (Kind.OPTIMIZER_STATE, "exp_avg_sq")
    )
}  # fmt: skip


def update(size: float, seed: int) -> Block:
    """What an update of AdamW read and left, with errors, where gradients are of a size."""
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(0, size, 500).astype(np.float32) for name in ("g", "exp_avg")}
    values["exp_avg_sq"] = (rng.normal(0, size, 500) ** 2).astype(np.float32)
    values |= {name: rng.normal(0, 1, 500).astype(np.float32) for name in ("param", "model")}
    items = {name: SimpleNamespace(entry=SimpleNamespace(dtype="float32")) for name in (*values, "step")}
    after = {name: items[name] for name in ("exp_avg", "exp_avg_sq", "step")}
    source = UpdateSource("AdamW", items["param"], items["g"], {}, after, ADAMW)
    numbers = {id(items["step"]): np.asarray(3.0)}
    left = {slot: items[name] for slot, name in LEFT.items()}
    return Block(source, left, numbers, {id(items[name]): value for name, value in values.items()})


@pytest.mark.parametrize("size", [1.0, 1e-9, 1e-30, 1e18])
@pytest.mark.parametrize("slot", LEFT, ids=LEFT.values())
def test_sizes_in_float32_are_those_in_float64(slot: Slot, size: float) -> None:
    """Where float32 has no digits for them they are computed in float64."""
    pieces = Pieces(update(size, 1), update(size, 2), 0)
    (error, sizes), (exact, wide) = pieces.between(slot), between(slot, *pieces.wide)
    np.testing.assert_allclose(error.astype(np.float64), exact, rtol=2e-7, atol=1e-44)
    np.testing.assert_allclose(sizes.astype(np.float64), wide, rtol=2e-6, atol=1e-44)
    narrow = {"model": (1.0, 1e-9, 1e-30, 1e18), "exp_avg": (1.0, 1e-9), "exp_avg_sq": (1.0,)}
    assert (sizes.dtype == np.float32) == (size in narrow[slot.slot])
