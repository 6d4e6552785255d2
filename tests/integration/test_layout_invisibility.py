"""Recording changes no bit of a training under any layout: losses, parameters, optimizer state, generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.tracer.reader import Trace
from tests.integration.layout_cases import QUICK, WIDE
from tests.integration.layouts import Case, Ran, launch

FIRST = ["ddp", "fsdp1", "fsdp2-split", "zero1", "tp-shared-kv", "tp-sp", "pp-tied", "cp-ring", "ep"]
"""Of the layouts of two ranks, one for each way in which a recorder reaches into torch."""


def altered(folder: Path, ranks: int, cases: list[Case]) -> list[str]:
    """Train the cases with and without recording; return those that recording changed."""
    plain = launch(folder / "plain", ranks, cases, recorded=False)
    traced = launch(folder / "traced", ranks, cases)
    for case in cases:
        assert_recorded(traced, case)
    return [case.name for case in cases if plain.told(case) != traced.told(case)]


def assert_recorded(ran: Ran, case: Case) -> None:
    """A recorder that records nothing, or gives up, is invisible too."""
    with Trace.open(ran.trace(case)) as trace:
        ended = [rank.manifest and rank.manifest.ended for rank in trace.ranks]
        assert ended == ["finished"] * case.ranks, (case.name, ended)
        assert all(rank.entries for rank in trace.ranks), case.name


@pytest.mark.slow  # in CI the tests of each kind of layout hold the same promise
def test_recording_changes_no_bit_of_two_ranks(tmp_path: Path) -> None:
    assert altered(tmp_path, 2, [case for case in QUICK if case.name in FIRST]) == []


@pytest.mark.slow
def test_recording_changes_no_bit_of_the_other_layouts_of_two_ranks(tmp_path: Path) -> None:
    assert altered(tmp_path, 2, [case for case in QUICK if case.name not in FIRST]) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_recording_changes_no_bit_of_more_ranks(tmp_path: Path, ranks: int) -> None:
    assert altered(tmp_path, ranks, [case for case in WIDE if case.ranks == ranks]) == []
