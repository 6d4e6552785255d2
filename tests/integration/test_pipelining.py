"""A recorded pipeline has every boundary of the whole model, under its name and microbatch, and no other."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tensortrace.diff.engine import compare
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Entry
from tests import harness

SCRIPT = harness.TRAINING / "pipeline.py"
CHUNKS = 4

RUNS: dict[str, tuple[str, ...]] = {
    "1f1b": ("--schedule", "1f1b"),
    "interleaved": ("--schedule", "interleaved", "--stages-per-rank", "2"),
    "gpipe": (),
    "zero bubble": ("--schedule", "zero-bubble", "--stages-per-rank", "2"),
    "parts of a whole model": ("--split", "sliced"),
    "traced": ("--split", "traced"),
    "two runs of the schedule in a step": ("--passes", "2", "--schedule", "1f1b"),
}
QUICK = {"1f1b", "interleaved"}
SCALED = {"activation_grad", "local_grad"}
"""The schedule divides the gradients at the end, one process its losses at the start."""

BESIDE = {"rng", "collective", "schedule"}

Key = tuple[int, int | None, str, str, str, int]


class Found(NamedTuple):
    entry: Entry
    value: NDArray[np.float64]


def boundaries(trace: Path) -> list[dict[Key, Found]]:
    """Return what each rank recorded of the ladder."""
    opened = Trace.open(trace)
    assert opened.problems == ()
    found: list[dict[Key, Found]] = []
    for rank in opened.ranks:
        assert rank.manifest is not None
        assert rank.manifest.ended == "finished"
        kept: dict[Key, Found] = {}
        for e in rank.entries:
            if e.kind not in BESIDE:
                key = (e.step, e.microbatch, e.kind.value, e.name, e.slot, e.call)
                assert key not in kept
                kept[key] = Found(e, rank.read(e).astype(np.float64))
        found.append(kept)
    return found


def recorded(folder: Path, ranks: int, *arguments: str) -> list[dict[Key, Found]]:
    """Run the program with and without recording, which must compute the same bits, and read the trace."""
    command = harness.on_ranks(ranks, SCRIPT, *arguments)
    trace = folder / f"trace{ranks}"
    runs = [harness.run(c, folder=folder) for c in (command, harness.recording(trace, command))]
    assert [run.exit_code for run in runs] == [0, 0], runs[-1].errors
    digests = [sorted(re.findall(r"digest \d [0-9a-f]{64}", run.output)) for run in runs]
    assert digests[0] == digests[1]
    assert len(digests[0]) == ranks
    return boundaries(trace)


class Run(NamedTuple):
    folder: Path
    whole: dict[Key, Found]
    ranks: list[dict[Key, Found]]
    arguments: tuple[str, ...]


@pytest.fixture(
    scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    arguments = RUNS[request.param]
    folder = tmp_path_factory.mktemp("pipeline")
    passes = arguments[:2] if "--passes" in arguments else ()
    [whole] = recorded(folder, 1, *passes)
    return Run(folder, whole, recorded(folder, 2, *arguments), arguments)


def is_of_a_stage(key: Key) -> bool:
    return key[3].startswith("(stage ")


STAND_INS = "one run gives the gradient of all modules that take this tensor, the other that of this one"
"""Said of inputs of sharded modules, of which FSDP2 makes each module a stand-in of its own."""


def assert_whole(whole: Path, stages: Path, *, but_for: str = "") -> None:
    """Assert that a diff finds nothing, and only misses what stages exchange, or ``but_for`` what reason."""
    result = compare(whole, stages)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete
    assert all(
        "(stage " in str(example)
        for missing in result.coverage.missing
        if missing.reason != but_for
        for example in missing.examples
    )


def test_every_boundary_of_the_whole_model_is_recorded_on_one_rank_and_only_these(run: Run) -> None:
    owners: dict[Key, int] = defaultdict(int)
    for rank in run.ranks:
        for key in rank:
            owners[key] += not is_of_a_stage(key)
    assert {key for key, count in owners.items() if count} == set(run.whole)
    assert {count for key, count in owners.items() if not is_of_a_stage(key)} == {1}


def test_the_values_are_those_of_the_whole_model(run: Run) -> None:
    """Losses are given undivided to the schedule, which divides the gradients by the number of chunks."""
    divided = CHUNKS * (2 if "--passes" in run.arguments else 1)
    for key, (entry, value) in ((k, found) for rank in run.ranks for k, found in rank.items()):
        if is_of_a_stage(key):
            continue
        factor = (
            divided if key[2] in SCALED or key[3:5] in {("backward", "value")} or key[4] == "weight" else 1
        )
        expected = run.whole[key].value * factor
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5, err_msg=str(entry.key))


def test_the_diff_against_one_process_is_equivalent_and_complete(run: Run) -> None:
    assert_whole(run.folder / "trace1", run.folder / "trace2")


def test_what_a_stage_sends_is_what_the_next_receives(run: Run) -> None:
    held = {key: found for rank in run.ranks for key, found in rank.items() if is_of_a_stage(key)}
    stages = 4 if "--stages-per-rank" in run.arguments else 2
    for number in range(stages - 1):
        for kind in ("activation", "activation_grad"):
            sent = [k for k in held if k[2:5] == (kind, f"(stage {number})", "out")]
            assert len(sent) == 2 * CHUNKS * (2 if "--passes" in run.arguments else 1)
            for step, microbatch, *_ in sent:
                out = held[step, microbatch, kind, f"(stage {number})", "out", 0].value
                received = held[step, microbatch, kind, f"(stage {number + 1})", "in.0", 0].value
                np.testing.assert_array_equal(out, received)


def test_no_parameter_is_recorded_by_a_rank_that_does_not_hold_it(run: Run) -> None:
    held = [{key[3] for key in rank if key[2] == "param"} for rank in run.ranks]
    assert held[0] & held[1] == set()
    assert held[0] | held[1] == {key[3] for key in run.whole if key[2] == "param"}


@pytest.mark.slow
def test_a_sharded_stage_reduces_after_its_last_chunk(tmp_path: Path) -> None:
    recorded(tmp_path, 1, "--dp", "2")
    ranks = recorded(tmp_path, 4, "--dp", "2", "--data", "fsdp2")
    for kept in ranks:
        reduced = {(key[0], key[1], key[5]) for key in kept if key[2] == "reduced_grad"}
        assert reduced == {(0, CHUNKS - 1, 0), (1, CHUNKS - 1, 0)}
    assert_whole(tmp_path / "trace1", tmp_path / "trace4", but_for=STAND_INS)


@pytest.mark.slow
def test_replicas_of_each_stage_reduce_before_the_schedule_divides(tmp_path: Path) -> None:
    [whole] = recorded(tmp_path, 1, "--dp", "2")
    ranks = recorded(tmp_path, 4, "--dp", "2")
    ends = [
        key for key in whole if key[2] in {"param", "optimizer_state"} or key[1:3] == (None, "clipped_grad")
    ]
    for rank, kept in enumerate(ranks):
        mine = [key for key in ends if key in kept]
        assert 0 < len(mine) < len(ends)
        for key in mine:
            np.testing.assert_allclose(kept[key].value, whole[key].value, rtol=1e-4, atol=1e-5)
        reduced = {key: found for key, found in kept.items() if key[2] == "reduced_grad"}
        assert {(key[0], key[1], key[5]) for key in reduced} == {(0, CHUNKS - 1, 0), (1, CHUNKS - 1, 0)}
        for (step, _, _, name, *_), found in reduced.items():
            consumed = kept[step, None, "clipped_grad", name, "grad", 0].value
            np.testing.assert_allclose(found.value, consumed * CHUNKS, rtol=1e-6)
            shard = found.entry.shard
            assert shard is not None
            assert (shard.placements[0].kind, shard.coordinate) == ("replicate", (rank % 2,))
    samples = [found.entry.shard for key, found in ranks[3].items() if key[2] == "activation"]
    assert {shard.placements[0].kind for shard in samples if shard} == {"data"}
    assert None not in samples


@pytest.mark.slow
def test_layers_that_stages_number_anew_are_told_apart_on_a_rank(tmp_path: Path) -> None:
    arguments = ("--split", "renumbered", "--stages-per-rank", "2", "--schedule", "interleaved")
    first, second = recorded(tmp_path, 2, *arguments)
    names = [{key[3] for key in rank if key[2] == "param"} for rank in (first, second)]
    weights = [sorted(name for name in held if name.endswith("mix.weight")) for held in names]
    assert weights[0] == ["(stage 2).layers.0.mix.weight", "layers.0.mix.weight"]
    assert weights[1] == ["(stage 3).layers.0.mix.weight", "layers.0.mix.weight"]
