"""Under torch.compile graphs stay whole on every layout; what is outside them is recorded and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensortrace.diff.engine import compare
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests import harness

pytestmark = pytest.mark.slow

SCRIPT = harness.TRAINING / "compiled.py"
CASES = ("ddp:inside", "ddp:outside", "fsdp2:blocks", "fsdp2:outside", "tp:blocks", "tp:outside")
OUTSIDE = {"(root)", "embed", "blocks.0", "blocks.1", "head"}
"""The calls that nothing of a compiled block can hide."""

SEEN = {
    "ddp:inside": {"(root)"},
    "ddp:outside": {"(root)"},
    "fsdp2:blocks": OUTSIDE,
    "fsdp2:outside": OUTSIDE,  # whose hooks break the graph into the blocks'
    "tp:blocks": OUTSIDE,
    "tp:outside": {"(root)"},
}


def ran(ranks: int, folder: str, *cases: str) -> dict[str, dict[str, object]]:
    done = harness.run(harness.on_ranks(ranks, SCRIPT, folder, *cases))
    assert done.exit_code == 0, done.errors
    told = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    return {one.pop("case"): one for one in told}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def told(folder: Path) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Return what two ranks say of each case, without recording and with, in a process of its own each."""
    ran(1, str(folder), "single:eager")
    return ran(2, "-", *CASES), ran(2, str(folder), *CASES)


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_graphs_are_those_of_an_unrecorded_run(
    told: tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]], case: str
) -> None:
    alone, recorded = (side[case] for side in told)
    assert alone["graphs"], "something was compiled"
    assert recorded == alone


@pytest.mark.parametrize("case", CASES)
def test_what_is_outside_of_graphs_is_recorded_and_equals_an_eager_rank(
    told: object, folder: Path, case: str
) -> None:
    with Trace.open(folder / case) as trace:
        for rank in trace.ranks:
            assert {e.name for e in rank.entries if e.kind is Kind.ACTIVATION} == SEEN[case]
            assert rank.manifest is not None
            assert rank.manifest.ended == "finished"
    result = compare(folder / "single:eager", folder / case)
    assert result.verdict == "equivalent", result.headline
    hidden = {missing.reason for missing in result.coverage.missing if missing.side == "a"}
    assert hidden == {"inside a graph of torch.compile, which is not observed"}
