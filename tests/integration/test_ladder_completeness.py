"""The ladder of a recorded run holds every rung, and its numbers follow from each other in float64."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tensortrace.tracer.reader import Trace
from tests import harness

SCRIPT = harness.TRAINING / "ladder_ddp.py"
STEPS = 3
PARAMETERS = {
    "embed.weight", "norm.weight", "norm.bias", "mix.0.weight", "mix.0.bias", "branch.weight", "branch.bias",
}  # fmt: skip
STATE = {"step", "exp_avg", "exp_avg_sq"}

RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "one rank, fp16 scaler": (1, ("--scaler",)),
    "reducing every backward": (2, ()),
    "no_sync": (2, ("--no-sync",)),
    "bucket views": (2, ("--bucket-view", "--no-sync")),
    "static graph": (2, ("--static-graph", "--accumulate", "1")),
    "unused parameters": (2, ("--unused",)),
    "skipped step": (2, ("--scaler", "--no-sync")),
}

Array = NDArray[np.float64]
Key = tuple[int, int | None, str, str, int]


class Ladder:
    """The values of one rank, by kind and (step, microbatch, name, slot, call)."""

    def __init__(self, trace: Path, rank: int) -> None:
        self.kinds: dict[str, dict[Key, Array]] = defaultdict(dict)
        opened = Trace.open(trace)
        assert opened.problems == ()
        of_rank = opened.ranks[rank]
        assert of_rank.manifest is not None
        self.absent = of_rank.manifest.absent
        for e in of_rank.entries:
            key = (e.step, e.microbatch, e.name, e.slot, e.call)
            self.kinds[e.kind][key] = of_rank.read(e).astype(np.float64)
        self.entries = of_rank.entries

    def get(self, kind: str, step: int, microbatch: int | None, name: str, slot: str, call: int = 0) -> Array:
        return self.kinds[kind][step, microbatch, name, slot, call]

    def names(self, kind: str, step: int, microbatch: int | None, slot: str) -> set[str]:
        return {n for s, m, n, sl, _ in self.kinds[kind] if (s, m, sl) == (step, microbatch, slot)}


GLOO_ABORT = "terminate called without an active exception"
"""What a gloo rank says that dies as the interpreter exits, recorded or not (1 in 12 runs of torch 2.13)."""


def run_to_end(command: list[str], folder: Path) -> harness.Finished:
    """Run a command, again where gloo aborted after the program had ended."""
    for _ in range(3):
        done = harness.run(command, folder=folder)
        if GLOO_ABORT not in done.errors:
            break
    return done


COSTLY = {"one rank", "no_sync", "static graph"}
"""Runs whose rungs the others cover too."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow) if name in COSTLY else name for name in RUNS],
)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Ladder], tuple[str, ...]]:
    ranks, arguments = RUNS[request.param]
    folder = tmp_path_factory.mktemp("ladder")
    command = harness.on_ranks(ranks, SCRIPT, "--steps", STEPS, *arguments)
    plain = run_to_end(command, folder)
    done = run_to_end(harness.recording(folder / "trace", command, "--force"), folder)
    assert done.exit_code == plain.exit_code == 0, done.errors
    digests = [sorted(re.findall(r"digest \d [0-9a-f]{64}", text)) for text in (plain.output, done.output)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == ranks
    return [Ladder(folder / "trace", rank) for rank in range(ranks)], arguments


Run = tuple[list[Ladder], tuple[str, ...]]


def microbatches(arguments: tuple[str, ...]) -> range:
    return range(1 if "--static-graph" in arguments else 2)


def every_gradient(ladders: list[Ladder], arguments: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for step in range(STEPS):
        for name in sorted(PARAMETERS):
            yield step, name


def test_every_trainable_parameter_has_every_kind_at_every_step(run: Run) -> None:
    ladders, arguments = run
    last = microbatches(arguments)[-1]
    for rank, ladder in enumerate(ladders):
        used = PARAMETERS - (
            {"branch.weight", "branch.bias"} if "--unused" in arguments and rank == 1 else set()
        )
        for step in range(STEPS):
            for microbatch in microbatches(arguments):
                assert ladder.names("local_grad", step, microbatch, "grad") == used
            assert ladder.names("local_grad", step, None, "grad") == used
            assert ladder.names("clipped_grad", step, last, "before") == PARAMETERS
            assert ladder.names("clipped_grad", step, last, "grad") == PARAMETERS
            assert ladder.names("clipped_grad", step, None, "grad") == PARAMETERS
            assert ladder.names("param", step, None, "model") == PARAMETERS
            if len(ladders) > 1:
                assert ladder.names("reduced_grad", step, last, "grad") == PARAMETERS
            for slot in STATE if "--scaler" not in arguments or step != 1 else ():
                assert ladder.names("optimizer_state", step, None, slot) == PARAMETERS
        frozen = {"frozen.weight", "frozen.bias"}
        assert ladder.names("param", -1, None, "model") == PARAMETERS | frozen
        assert ladder.names("buffer", -1, None, "model") >= {"norm.running_mean", "norm.running_var"}
        assert ("reduced_grad" in ladder.absent) is (len(ladders) == 1)
        assert ("unscaled_grad" in ladder.absent) is ("--scaler" not in arguments)


def test_no_two_boundaries_have_the_same_key(run: Run) -> None:
    for ladder in run[0]:
        keys = [entry.key for entry in ladder.entries if not entry.recompute]
        assert len(keys) == len(set(keys))


def test_the_window_sum_is_the_sum_of_its_microbatches(run: Run) -> None:
    ladders, arguments = run
    for ladder in ladders:
        for (step, microbatch, name, slot, _), total in ladder.kinds["local_grad"].items():
            if microbatch is None and slot == "grad":
                parts = sum(ladder.get("local_grad", step, m, name, "grad") for m in microbatches(arguments))
                np.testing.assert_allclose(total, parts, rtol=1e-6, atol=1e-6)


def test_the_reduced_gradient_is_the_mean_over_ranks_of_the_local_ones(run: Run) -> None:
    ladders, arguments = run
    if len(ladders) == 1:
        pytest.skip("one rank reduces nothing")
    for step, name in every_gradient(ladders, arguments):
        shape = ladders[0].get("param", -1, None, name, "model").shape
        locals_ = [
            ladder.kinds["local_grad"].get((step, None, name, "grad", 0), np.zeros(shape))
            for ladder in ladders
        ]
        mean = np.mean(locals_, axis=0)
        calls = [key[4] for key in ladders[0].kinds["reduced_grad"] if key[0] == step and key[2] == name]
        assert len(calls) == (1 if "--no-sync" in arguments else len(microbatches(arguments)))
        for ladder in ladders:
            reduced = ladder.get("reduced_grad", step, microbatches(arguments)[-1], name, "grad", max(calls))
            np.testing.assert_allclose(
                reduced, mean, rtol=1e-5, atol=1e-6 * (256 if "--scaler" in arguments else 1)
            )


def test_the_unscaled_gradient_is_the_gradient_over_the_loss_scale(run: Run) -> None:
    ladders, arguments = run
    if "--scaler" not in arguments:
        pytest.skip("no scaler")
    last = microbatches(arguments)[-1]
    for ladder in ladders:
        for step, name in every_gradient(ladders, arguments):
            scale = ladder.get("schedule", step, None, "scaler.0", "scale")
            kind, at = ("reduced_grad", last) if len(ladders) > 1 else ("local_grad", None)
            before = ladder.get(kind, step, at, name, "grad")
            after = ladder.get("unscaled_grad", step, last, name, "grad")
            np.testing.assert_allclose(after, before / scale, rtol=1e-6)


def test_the_clipped_gradient_is_the_one_before_times_the_coefficient(run: Run) -> None:
    ladders, arguments = run
    last = microbatches(arguments)[-1]
    for ladder in ladders:
        for step in range(STEPS):
            skipped = "--scaler" in arguments and step == 1
            before = {n: ladder.get("clipped_grad", step, last, n, "before") for n in PARAMETERS}
            norm = np.sqrt(sum(float((value**2).sum()) for value in before.values()))
            coefficient = float(ladder.get("clipped_grad", step, last, "(clip)", "coefficient"))
            if not skipped:
                stated = float(ladder.get("clipped_grad", step, last, "(clip)", "total_norm"))
                assert stated == pytest.approx(norm, rel=1e-5)
                assert coefficient == pytest.approx(min(1.0, 0.05 / (norm + 1e-6)), rel=1e-5)
                assert coefficient < 1
            for name in PARAMETERS:
                clipped = ladder.get("clipped_grad", step, last, name, "grad")
                np.testing.assert_allclose(clipped, before[name] * coefficient, rtol=1e-6)
                np.testing.assert_array_equal(ladder.get("clipped_grad", step, None, name, "grad"), clipped)


def test_the_parts_of_a_tied_parameter_add_up_to_its_gradient(run: Run) -> None:
    ladders, arguments = run
    for ladder in ladders:
        for step in range(STEPS):
            for m in microbatches(arguments):
                parts = [
                    ladder.get("local_grad", step, m, "embed.weight", f"use.{use}")
                    for use in ("embed", "head")
                ]
                whole = ladder.get("local_grad", step, m, "embed.weight", "grad")
                np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-4)


def test_a_skipped_step_is_stated_and_leaves_parameters_alone(run: Run) -> None:
    ladders, arguments = run
    for ladder in ladders:
        skipped = [int(ladder.get("schedule", s, None, "optimizer.0", "skipped")) for s in range(STEPS)]
        assert skipped == ([0, 1, 0] if "--scaler" in arguments else [0, 0, 0])
        for name in PARAMETERS if "--scaler" in arguments else ():
            first, second, third = (ladder.get("param", s, None, name, "model") for s in range(STEPS))
            np.testing.assert_array_equal(first, second)
            assert not np.array_equal(second, third)


def test_every_boundary_of_a_data_parallel_run_says_how_it_lies(run: Run) -> None:
    ladders, _ = run
    replicated = ("param", "buffer", "optimizer_state", "reduced_grad", "unscaled_grad", "clipped_grad")
    own = ("input", "activation", "activation_grad", "loss")
    expected = dict.fromkeys(replicated, "replicate") | dict.fromkeys(own, "data")
    expected["local_grad"] = "partial"
    for rank, ladder in enumerate(ladders):
        for entry in ladder.entries:
            if len(ladders) == 1:
                assert entry.shard is None
            elif entry.kind in expected and entry.name != "(clip)":
                assert entry.shard is not None, entry.key
                assert (entry.shard.mesh, entry.shard.coordinate) == ("ddp", (rank,))
                assert [p.kind for p in entry.shard.placements] == [expected[entry.kind]]
                assert (entry.shard.global_shape is None) is (expected[entry.kind] == "data")
