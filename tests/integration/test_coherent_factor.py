"""Half a percent in one parameter's gradient is found under bfloat16, on two real ranks against one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness

pytestmark = pytest.mark.slow

PROGRAM = harness.TRAINING / "coherent.py"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.record(tmp_path_factory.mktemp("single") / "a", harness.python(PROGRAM))


def test_two_ranks_under_bfloat16_are_as_one(tmp_path: Path, single: Path) -> None:
    found = harness.diff(single, harness.record(tmp_path / "b", harness.torchrun(2, PROGRAM)))
    assert found.exit_code == 0, found.summary()
    weights = [b for b in found.result.boundaries if (b.where.kind, b.where.slot) == ("local_grad", "grad")]
    matrices = [b.judgement for b in weights if b.where.name in ("2.weight", "4.weight")]
    assert all(j.power_coherent is not None and j.power_coherent < 0.005 for j in matrices)
    assert all(j.power_incoherent is not None and j.power_incoherent > 0.02 for j in matrices)


def test_half_a_percent_in_one_gradient_is_found_by_the_projection(tmp_path: Path, single: Path) -> None:
    command = harness.torchrun(2, PROGRAM, "--factor", 1.005)
    found = harness.diff(single, harness.record(tmp_path / "b", command))
    first = found.result.first_divergent
    assert first is not None, found.summary()
    assert (first.where.step, first.where.kind, first.where.name) == (0, "local_grad", "2.weight")
    assert first.judgement is not None
    assert first.judgement.reason.startswith("common factor 0.00")
    assert first.metrics is not None
    assert first.metrics.rel_l2 is not None
    assert first.metrics.rel_l2 < (first.judgement.noise or 0.0)  # in L2 it would have passed
    [cause] = found.result.causes  # undoing it leaves the noise in L2, and no factor
    assert cause.code == "scale.other"
    assert cause.number == pytest.approx(1.005, abs=5e-4)
