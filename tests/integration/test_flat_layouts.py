"""What ZeroRedundancyOptimizer and FSDP1 hold in parts is recorded so that it makes the whole again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Entry
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
