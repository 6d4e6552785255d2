"""Modules on two ranks are executed again on global tensors: a wrong reduction is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.replay import replay
from tests import harness


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all traces that two ranks leave in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    script = harness.TRAINING / "module_ranks.py"
    done = harness.run(harness.torchrun(2, script, folder))
    assert done.exit_code == 0, done.errors
    return folder


@pytest.mark.parametrize("name", ["ddp", "tp"])
def test_modules_of_two_ranks_agree(traces: Path, name: str) -> None:
    result = replay(traces / name)
    assert result.verdict == "agrees", result.headline
    # six modules in two steps; ranks with samples of their own are parts of one boundary
    assert result.replayed["activation"] == 12
    assert result.replayed["local_grad"] == 16
    assert result.replayed["activation_grad"] == 10  # the first module's input wants none


def test_a_bias_that_each_rank_adds_is_named(traces: Path) -> None:
    result = replay(traces / "twice")
    found = {(f.where.kind, f.where.name, f.where.slot) for f in result.mismatches}
    assert found == {("activation", "2", "out")}
    assert [cause.code for cause in result.causes] == ["bias.duplicated"]


def test_a_sum_over_ranks_that_is_missing_is_named(traces: Path) -> None:
    result = replay(traces / "unreduced")
    assert result.first_mismatch is not None
    at = result.first_mismatch.where
    assert (at.step, at.kind, at.name, at.slot) == (0, "activation", "2", "out")
    assert result.causes[0].code in ("replica.disagrees", "reduction.missing")
