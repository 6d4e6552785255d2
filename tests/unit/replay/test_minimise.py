"""The search for a small part, on entries and a judge that are made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tensortrace.replay.cut import Atom, Part, cut, whole
from tensortrace.replay.minimise import minimise
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, Kind, Placement, Shard
from tests.synthetic import Tensor, write_trace

X = np.arange(6, dtype=np.float32)
KINDS = (Kind.ACTIVATION, Kind.LOCAL_GRAD, Kind.PARAM)
STEPS, NAMES = range(-1, 3), ("one.w", "two.w", "three.w")


def records(rank: int) -> list[Tensor]:
    """Return 4 steps of 3 kinds of 3 names: event 9·(step + 1) + 3·kind + name."""
    return [
        ({"step": step, "microbatch": None, "kind": kind, "name": name}, X + rank)
        for step in STEPS
        for kind in KINDS
        for name in NAMES
    ]


def traces(folder: Path) -> list[Trace]:
    found = [write_trace(folder / side, [records(0), records(1)]) for side in "ab"]
    return [Trace.open(path) for path in found]


def test_what_is_left_is_what_the_verdict_needs_and_nothing_else(tmp_path: Path) -> None:
    needed = {Atom(0, 0, 18 + 3), Atom(1, 1, 18 + 3), Atom(1, 0, 8)}  # step 1: a gradient; init: a parameter
    found = minimise(traces(tmp_path), lambda part: needed <= part.kept, step=1)
    twins = {Atom(side, rank, 18 + 3) for side in (0, 1) for rank in (0, 1)}
    twins |= {Atom(side, rank, 8) for side in (0, 1) for rank in (0, 1)}
    # a boundary is left out on all ranks of both traces or on none, unless a whole rank is left out
    assert needed <= found.kept <= twins
    assert found.bare == found.kept


def test_values_stay_where_the_verdict_needs_them(tmp_path: Path) -> None:
    origin, beside = Atom(0, 0, 9), Atom(0, 0, 10)

    def holds(part: Part) -> bool:
        return {origin, beside} <= part.kept and origin not in part.bare

    found = minimise(traces(tmp_path), holds, step=0)
    assert (origin in found.bare, beside in found.bare) == (False, True)


def test_no_step_behind_the_verdict_is_kept_and_init_only_where_it_is_needed(tmp_path: Path) -> None:
    opened = traces(tmp_path)
    steps = {
        number: {opened[0].ranks[0].entries[atom.event].step for atom in found.kept}
        for number in (INIT_STEP, 1)
        for found in [minimise(opened, lambda part: len(part.kept) > 3, step=number)]
    }
    assert steps == {INIT_STEP: {INIT_STEP}, 1: {1}}


def test_the_second_traces_steps_are_counted_from_its_own_start(tmp_path: Path) -> None:
    opened = traces(tmp_path)
    tried: list[set[tuple[int, int]]] = []

    def holds(part: Part) -> bool:
        tried.append({(a.side, opened[a.side].ranks[0].entries[a.event].step) for a in part.kept})
        return False

    minimise(opened, holds, step=2, offset=1, trials=3)
    assert all(steps <= {(0, 2), (1, 1), (0, -1), (1, -1), (0, 1), (1, 0)} for steps in tried)


def test_trials_are_bounded_and_what_was_found_by_then_stands(tmp_path: Path) -> None:
    opened = traces(tmp_path)
    calls = 0

    def holds(part: Part) -> bool:
        nonlocal calls
        calls += 1
        return Atom(0, 0, 18) in part.kept

    found = minimise(opened, holds, step=1, trials=12)
    assert calls <= 12
    assert Atom(0, 0, 18) in found.kept < whole(opened).kept


def test_a_part_reads_as_a_trace_whose_first_holder_of_a_content_has_its_bytes(tmp_path: Path) -> None:
    shard = Shard("ddp", (0,), (Placement("replicate"),), (6,))
    tensors: list[Tensor] = [
        ({"name": "first", "shard": shard}, X), ({"name": "again", "producers": (0,), "shard": shard}, X),
        ({"name": "once more", "producers": (0, 1)}, X), ({"name": "other", "producers": (2,)}, X + 1),
    ]  # fmt: skip
    trace = Trace.open(write_trace(tmp_path / "a", [tensors]))
    kept = frozenset(Atom(0, 0, event) for event in (1, 2, 3))
    [found] = cut([trace], Part(kept, frozenset({Atom(0, 0, 3)})))
    [rank] = found.ranks
    assert [entry.producers for entry in rank.entries] == [(), (1,), (2,)]
    assert [entry.same_as for entry in rank.entries] == [None, 1, None]
    assert [rank.stored(entry) for entry in rank.entries] == [True, True, False]
    np.testing.assert_array_equal(rank.read(rank.entries[1]), X)
    assert rank.entries[0].shard == shard
    assert rank.manifest is not None
    assert rank.manifest.boundaries == 3
    assert found.problems == ()
