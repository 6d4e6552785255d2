"""What ZeroRedundancyOptimizer and FSDP1 hold in parts is recorded so that it makes the whole again."""

from __future__ import annotations

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
from tests.integration.judged import assert_equivalent
from tests.integration.layouts import Case, Ran, launch

ALONE = Case("alone", 1)
ZERO = Case("zero", 2, spread="--layout zero1")
CASES = [ZERO]
STEPS = range(3)

Key = tuple[int, int | None, str, str, str, int]


class Found(NamedTuple):
    entry: Entry
    value: NDArray[np.float64]


class Recorded:
    """The boundaries of each rank by key."""

    def __init__(self, trace: Path) -> None:
        opened = Trace.open(trace)
        assert opened.problems == ()
        self.ranks: list[dict[Key, Found]] = []
        for rank in opened.ranks:
            assert rank.manifest is not None
            assert rank.manifest.ended == "finished"
            kept: dict[Key, Found] = {}
            for e in rank.entries:
                key = (e.step, e.microbatch, e.kind.value, e.name, e.slot, e.call)
                assert key not in kept
                kept[key] = Found(e, rank.read(e).astype(np.float64))
            self.ranks.append(kept)

    def having(self, kind: str, **fields: object) -> dict[Key, list[Found | None]]:
        """Return, for each key of a kind, what each rank has under it."""
        keys = {key for kept in self.ranks for key in kept if key[2] == kind}
        wanted = {key for key in keys if all(key[FIELDS[name]] == value for name, value in fields.items())}
        return {key: [kept.get(key) for kept in self.ranks] for key in sorted(wanted, key=repr)}


FIELDS = {"step": 0, "microbatch": 1, "name": 3, "slot": 4, "call": 5}


class Runs(NamedTuple):
    alone: Recorded
    spread: Ran
    unrecorded: Ran

    def of(self, case: Case) -> Recorded:
        """Return what was recorded of a case, in which recording must have changed no bit."""
        digests = [[told["digest"] for told in ran.told(case)] for ran in (self.spread, self.unrecorded)]
        assert digests[0] == digests[1]
        return Recorded(self.spread.trace(case))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("flat")
    alone = launch(folder / "alone", 1, [ALONE])
    spread = launch(folder / "recorded", 2, CASES)
    return Runs(Recorded(alone.trace(ALONE)), spread, launch(folder / "plain", 2, CASES, recorded=False))


def assert_close(found: NDArray[np.float64], expected: NDArray[np.float64], what: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6, err_msg=str(what))


def test_the_owner_of_a_parameter_records_its_optimizer_state_and_no_other_rank_does(runs: Runs) -> None:
    states = runs.of(ZERO).having("optimizer_state")
    whole = runs.alone.having("optimizer_state")
    assert states.keys() == whole.keys()
    owners: dict[int, int] = defaultdict(int)
    for key, found in states.items():
        [(rank, held)] = [(rank, one) for rank, one in enumerate(found) if one is not None]
        owners[rank] += 1
        [expected] = whole[key]
        assert expected is not None
        assert_close(held.value, expected.value, key)
        assert held.entry.meta.optimizer == "AdamW"
    assert owners.keys() == {0, 1}


def test_every_rank_records_all_parameters_after_the_broadcast(runs: Runs) -> None:
    params, whole = runs.of(ZERO).having("param"), runs.alone.having("param")
    assert params.keys() == whole.keys()
    for key, (first, second) in params.items():
        assert first is not None
        assert second is not None
        np.testing.assert_array_equal(first.value, second.value)
        [expected] = whole[key]
        assert expected is not None
        np.testing.assert_allclose(first.value, expected.value, atol=2e-3)


def test_the_update_is_that_of_one_optimizer_over_all_parameters(runs: Runs) -> None:
    schedule, whole = runs.of(ZERO).having("schedule"), runs.alone.having("schedule")
    assert schedule.keys() == whole.keys()
    for key, found in schedule.items():
        for one in (*found, *whole[key]):
            assert one is not None
            assert one.entry.meta.members == whole[key][0].entry.meta.members
            assert one.value == whole[key][0].value
    consumed = runs.of(ZERO).having("clipped_grad", microbatch=None)
    assert consumed.keys() == runs.alone.having("clipped_grad", microbatch=None).keys()
    assert all(None not in found for found in consumed.values())


SCRIPT = harness.TRAINING / "fsdp1.py"
WAYS = {
    "full": (True, 2),
    "full-flat": (True, 1),
    "grad-op": (True, 1),
    "grad-op-flat": (True, 2),
    "no-shard": (False, 1),
    "no-shard-flat": (False, 2),
}
"""Whether parameters are sharded, and how often a step reduces: with and without ``no_sync``."""

OF_WINDOW = ("param", "optimizer_state", "reduced_grad", "clipped_grad")


class Fsdp(NamedTuple):
    folder: Path
    alone: Recorded
    spread: dict[str, Recorded]


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Fsdp:
    folder = tmp_path_factory.mktemp("fsdp1")
    for ranks, expected in ((1, 1), (2, 2 * len(WAYS))):
        done = harness.run(harness.on_ranks(ranks, SCRIPT, folder))
        assert done.exit_code == 0, done.errors
        told = [line.split() for line in done.output.splitlines() if line.endswith(("same", "different"))]
        assert len(told) == expected
        assert {line[-1] for line in told} == {"same"}, told
    return Fsdp(folder, Recorded(folder / "alone"), {name: Recorded(folder / name) for name in WAYS})


def assembled(found: list[Found | None], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Put flat intervals together; each element must be covered once, or by equal replicas."""
    total, covered = np.zeros(int(np.prod(shape))), np.zeros(int(np.prod(shape)), dtype=int)
    for one in found:
        if one is None:
            continue
        shard = one.entry.shard
        assert shard is not None
        assert (shard.mesh, shard.global_shape) == ("fsdp", shape)
        if shard.placements[0].kind == "replicate":
            assert one.value.shape == shape
            return one.value
        assert shard.placements[0].kind == "flat"
        [box] = shard.boxes
        [offset], [length] = box.offset, box.shape
        assert one.value.shape == (length,)
        assert length > 0
        total[offset : offset + length] = one.value
        covered[offset : offset + length] += 1
    assert set(covered) == {1}
    return total.reshape(shape)


@pytest.mark.parametrize("way", WAYS)
def test_the_diff_against_one_rank_is_equivalent_and_complete(fsdp: Fsdp, way: str) -> None:
    assert_equivalent(compare(fsdp.folder / "alone", fsdp.folder / way))


@pytest.mark.parametrize("way", WAYS)
def test_every_boundary_of_the_whole_model_is_recorded_by_some_rank(fsdp: Fsdp, way: str) -> None:
    spread = {key for kept in fsdp.spread[way].ranks for key in kept}
    alone = set(fsdp.alone.ranks[0])
    beside = {"collective", "reduced_grad"}
    assert {key for key in spread if key[2] not in beside} == {key for key in alone if key[2] not in beside}


@pytest.mark.parametrize("way", WAYS)
def test_intervals_make_the_parameters_gradients_and_moments_of_one_rank(fsdp: Fsdp, way: str) -> None:
    sharded, _ = WAYS[way]
    for kind in OF_WINDOW:
        for key, found in fsdp.spread[way].having(kind).items():
            if kind == "reduced_grad" or key[3] == "(clip)":
                continue
            expected = fsdp.alone.ranks[0][key].value
            np.testing.assert_allclose(
                assembled(found, expected.shape), expected, rtol=1e-3, atol=1e-5, err_msg=str(key)
            )
            kinds = {one.entry.shard.placements[0].kind for one in found if one and one.entry.shard}
            assert kinds == {"flat" if sharded and expected.shape else "replicate"}


@pytest.mark.parametrize("way", WAYS)
def test_the_local_gradient_is_each_ranks_own_before_any_reduction(fsdp: Fsdp, way: str) -> None:
    """Both ranks' means over half the rows are twice the mean over all of them."""
    recorded = fsdp.spread[way].having("local_grad")
    assert {key[1] for key in recorded} == {None, 0, 1}
    for key, found in recorded.items():
        expected = fsdp.alone.ranks[0][key].value
        values = []
        for one in found:
            assert one is not None
            assert one.entry.shard is not None
            assert (one.entry.shard.placements[0].kind, one.entry.shard.placements[0].op) == (
                "partial",
                "sum",
            )
            assert one.entry.shard.global_shape == one.value.shape == expected.shape
            values.append(one.value)
        assert not np.allclose(values[0], values[1])
        np.testing.assert_allclose(sum(values), 2 * expected, rtol=1e-3, atol=1e-5, err_msg=str(key))


@pytest.mark.parametrize("way", WAYS)
def test_the_reduced_gradient_is_what_the_wrapper_left_after_each_reduction(fsdp: Fsdp, way: str) -> None:
    _, times = WAYS[way]
    recorded, alone = fsdp.spread[way].having("reduced_grad"), fsdp.alone.ranks[0]
    calls = {(step, call) for step in range(2) for call in range(times)}
    assert {(key[0], key[5]) for key in recorded} == calls
    for key, found in recorded.items():
        step, microbatch, _, name, _, call = key
        assert microbatch == (call if times == 2 else 1)
        if call == times - 1:
            whole = alone[step, None, "local_grad", name, "grad", 0].value
            np.testing.assert_allclose(assembled(found, whole.shape), whole, rtol=1e-3, atol=1e-5)
        assert {one.entry.meta.op for one in found if one} == {"fsdp"}


@pytest.mark.parametrize("way", WAYS)
def test_the_wrappers_own_clipping_is_a_clip_of_all_parameters(fsdp: Fsdp, way: str) -> None:
    for step in range(2):
        whole = fsdp.alone.ranks[0][step, 1, "clipped_grad", "(clip)", "total_norm", 0]
        members: set[str] = set()
        for kept in fsdp.spread[way].ranks:
            found = kept[step, 1, "clipped_grad", "(clip)", "total_norm", 0]
            assert found.value == pytest.approx(whole.value, rel=1e-4)
            members |= set(found.entry.meta.members)
        assert members == set(whole.entry.meta.members)


@pytest.mark.parametrize("way", WAYS)
def test_samples_are_a_ranks_own_and_groups_name_every_parameter(fsdp: Fsdp, way: str) -> None:
    whole = fsdp.alone.ranks[0][0, None, "schedule", "optimizer.0.group.0", "lr", 0]
    for rank, kept in enumerate(fsdp.spread[way].ranks):
        for key, found in kept.items():
            if key[2] in ("input", "activation", "activation_grad", "loss") and key[1] is not None:
                assert found.entry.shard is not None
                assert [p.kind for p in found.entry.shard.placements] == ["data"]
                assert found.entry.shard.coordinate == (rank,)
        group = kept[0, None, "schedule", "optimizer.0.group.0", "lr", 0]
        assert set(group.entry.meta.members) == set(whole.entry.meta.members)
