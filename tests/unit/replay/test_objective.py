"""What tokens should weigh, by hand: the scalar oracles of the global mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tensortrace.replay import ReplayOptions, replay
from tensortrace.tracer.types import Kind, Mesh, Meta, Placement, Shard
from tests.synthetic import Tensor, write_trace

NAME = "weight"


def rank_of(number: int, losses: Sequence[float], weight: float, ranks: int) -> list[Tensor]:
    """Return what one rank records whose tokens all have the same gradient: 1 in the rank's own element."""
    count, mean = len(losses), Shard("ddp", (number,), (Placement("partial", op="sum"),), (ranks,))
    whole = Shard("ddp", (number,), (Placement("replicate"),), (ranks,))
    rows = np.arange(100 * number, 100 * number + count, dtype=np.int64).reshape(count, 1)
    window = {"microbatch": None}
    local = np.zeros(ranks, np.float32)
    local[number] = count * weight
    given = {"kind": Kind.LOSS, "name": "cross_entropy", "meta": Meta(reduction="none", ignore_index=-100)}
    return [
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, rows),
        ({**given, "slot": "value"}, np.array(losses, np.float32)),
        ({**given, "slot": "sum"}, np.float64(sum(losses))),
        ({**given, "slot": "target"}, np.zeros(count, np.int64)),
        ({**given, "slot": "count"}, np.int64(count)),
        ({**given, "slot": "weight"}, np.full(count, weight)),
        ({"kind": Kind.LOSS, "name": "backward", "slot": "value"}, np.float32(sum(losses) * weight)),
        ({"kind": Kind.LOCAL_GRAD, "name": NAME, "slot": "grad", "shard": mean}, local),
        ({"kind": Kind.LOCAL_GRAD, "name": NAME, "slot": "grad", "shard": mean, **window}, local),
        (
            {
                "kind": Kind.REDUCED_GRAD, "name": NAME, "slot": "grad", "shard": whole,
                "meta": Meta(op="ddp", ranks=tuple(range(ranks))),
            },
            np.zeros(ranks, np.float32),
        ),
    ]  # fmt: skip


def trace_of(folder: Path, batches: Sequence[Sequence[float]], weights: Sequence[float]) -> Path:
    """Write a step of ranks that average their gradients; each token of a rank weighs the same."""
    ranks = [
        rank_of(n, losses, w, len(batches))
        for n, (losses, w) in enumerate(zip(batches, weights, strict=True))
    ]
    sums = [len(losses) * w for losses, w in zip(batches, weights, strict=True)]
    total = np.array(sums, np.float32) / np.float32(len(batches))
    for records in ranks:
        fields, _ = records[-1]
        records[-1] = (fields, total)
        records.append(
            (
                {
                    "kind": Kind.CLIPPED_GRAD,
                    "name": NAME,
                    "slot": "grad",
                    "microbatch": None,
                    "shard": fields["shard"],
                },
                total,
            )
        )
    mesh = Mesh(("dp",), (len(batches),), tuple(range(len(batches))))
    return write_trace(folder, ranks, meshes={"ddp": mesh})


def objective_of(batches: Sequence[Sequence[float]], weights: Sequence[float]) -> float:
    """Return the value whose gradient the weights are: Σ weight · loss over ranks, averaged."""
    return sum(w * sum(losses) for losses, w in zip(batches, weights, strict=True)) / len(batches)


@pytest.mark.parametrize(
    ("batches", "right", "wrong"),
    [([[1.0, 3.0], [8.0]], 4.0, 5.0), ([[2.0, 4.0, 6.0], [8.0]], 5.0, 6.0)],
    ids=["4 not 5", "5 not 6"],
)
def test_the_mean_is_over_all_tokens(
    tmp_path: Path, batches: list[list[float]], right: float, wrong: float
) -> None:
    tokens = sum(map(len, batches))
    global_mean, local_means = [2 / tokens] * 2, [1 / len(losses) for losses in batches]
    assert objective_of(batches, global_mean) == pytest.approx(right)
    assert objective_of(batches, local_means) == pytest.approx(wrong)
    agrees = replay(trace_of(tmp_path / "a", batches, global_mean))
    assert agrees.verdict == "agrees", agrees.headline
    named = replay(trace_of(tmp_path / "b", batches, local_means))
    assert named.verdict == "mismatch"
    assert named.first_mismatch is not None
    assert named.first_mismatch.where.slot == "weight"
    assert named.causes[0].code == "scale.token_ratio"
    assert f"weighs 1/{tokens}" in named.headline


def test_a_mean_of_sequences_may_be_declared(tmp_path: Path) -> None:
    # one sequence on each rank: the mean of local means is what is meant
    batches = [[8.0], [8.0]]
    trace = trace_of(tmp_path / "a", batches, [1.0, 1.0])
    assert replay(trace, options=ReplayOptions(objective="sequence-mean")).verdict == "agrees"
