"""The packed cases of ``fixtures/``: each says what was derived by hand, also where no training script is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fixtures.make import DRAW, SCALARS, ZOO
from tensortrace.diff.result import Where
from tensortrace.replay import CaseReplay, replay_case
from tensortrace.replay.packed import unpacked
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests.harness import ROOT
from tests.zoo import collection
from tests.zoo.case import Draw
from tests.zoo.judging import matches

FIXTURES = ROOT / "fixtures"
CASES = sorted(FIXTURES.glob("*.zip"))
BUGS = {bug.name: bug for bug in collection.bugs()}
FROM_ZOO = [path for path in CASES if path.stem in BUGS]
LARGEST_BYTES, MEDIAN_BYTES = 200_000, 100_000


def replayed(name: str) -> CaseReplay:
    return replay_case(FIXTURES / f"{name}.zip")


@pytest.mark.parametrize("path", FROM_ZOO, ids=lambda path: path.stem)
def test_a_case_of_the_zoo_names_the_boundary_and_the_cause_that_were_derived(path: Path) -> None:
    planted = BUGS[path.stem].make(Draw(DRAW))
    found = replay_case(path)
    assert found.reproduced, found.deviations
    assert found.found.first is not None
    assert matches(
        Where(*(getattr(found.found.first, part) for part in Where.__struct_fields__)), planted.first
    )
    assert found.found.causes[0] == planted.code


def test_there_is_a_case_of_each_family_of_causes_and_all_are_small() -> None:
    page = (ROOT / "docs" / "causes.md").read_text()
    families = {line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")}
    packed = {BUGS[path.stem].make(Draw(DRAW)).code.partition(".")[0] for path in FROM_ZOO}
    assert packed == families
    sizes = [path.stat().st_size for path in CASES]
    assert max(sizes) < LARGEST_BYTES
    assert statistics.median(sizes) < MEDIAN_BYTES


def test_every_case_is_replayed_here() -> None:
    assert {path.stem for path in FROM_ZOO} == set(ZOO)
    assert {path.stem for path in CASES} == {*ZOO, *SCALARS}
    assert set(SCALARS) == {
        "scalar-mean-4-not-5", "scalar-mean-5-not-6", "scalar-mean-5-not-6-alone", "scalar-descent-to-1",
        "scalar-descent-overshoots-to-minus-3", "scalar-two-steps-1.8-1.62-one-step-1.6",
    }  # fmt: skip


# --- numbers that anybody can check ------------------------------------------------------------------


def numbers(name: str, side: str, kind: Kind, owner: str, slot: str) -> list[float]:
    """Return the recorded numbers of a boundary, in order."""
    with unpacked(FIXTURES / f"{name}.zip") as (folder, _):
        [rank] = Trace.open(folder / side).ranks
        return [
            float(value)
            for entry in rank.entries
            if (entry.kind, entry.name, entry.slot) == (kind, owner, slot) and entry.step >= 0
            for value in np.ravel(rank.read(entry))
        ]


@pytest.mark.parametrize(
    ("name", "losses", "right", "wrong"),
    [
        ("scalar-mean-4-not-5", [[1, 3], [8]], 4, 5),
        ("scalar-mean-5-not-6", [[2, 4, 6], [8]], 5, 6),
    ],
)
def test_the_mean_is_that_of_all_tokens_and_not_of_means(
    name: str, losses: list[list[float]], right: float, wrong: float
) -> None:
    objective = {
        side: sum(numbers(name, side, Kind.LOSS, "backward", "value")) for side in ("a", "b")
    }  # of both microbatches
    assert objective == pytest.approx({"a": right, "b": wrong}, rel=1e-6)
    sums = numbers(name, "a", Kind.LOSS, "cross_entropy", "sum")
    assert sums == pytest.approx([sum(batch) for batch in losses], rel=1e-6)
    found = replayed(name)
    assert found.reproduced, found.deviations
    assert (found.found.first and found.found.first.slot, found.found.causes[0]) == (
        "weight", "scale.token_ratio",
    )  # fmt: skip


def test_one_run_that_takes_the_mean_of_means_is_told_without_another() -> None:
    found = replayed("scalar-mean-5-not-6-alone")
    assert found.reproduced, found.deviations
    assert (found.found.verdict, found.found.causes[0]) == ("mismatch", "scale.token_ratio")


@pytest.mark.parametrize(
    ("name", "after"), [("scalar-descent-to-1", 1), ("scalar-descent-overshoots-to-minus-3", -3)]
)
def test_one_step_of_gradient_descent_on_half_x_squared_from_2(name: str, after: float) -> None:
    assert numbers(name, "a", Kind.PARAM, "x", "model") == pytest.approx([after], rel=1e-6)
    found = replayed(name)
    assert (found.reproduced, found.found.verdict) == (True, "agrees")


def test_two_steps_of_a_tenth_are_not_one_of_a_fifth() -> None:
    name = "scalar-two-steps-1.8-1.62-one-step-1.6"
    assert numbers(name, "a", Kind.PARAM, "x", "model") == pytest.approx([1.8, 1.62], rel=1e-6)
    assert numbers(name, "b", Kind.PARAM, "x", "model") == pytest.approx([1.6], rel=1e-6)
    found = replayed(name)
    assert found.reproduced, found.deviations
    assert (found.found.first and found.found.first.slot, found.found.causes[0]) == (
        "lr", "optimizer.hyperparameter",
    )  # fmt: skip


# --- where nothing but tensortrace is ------------------------------------------------------------------

_DEPENDENCIES = ("click", "msgspec", "numpy", "rich", "safetensors", "torch", "xxhash", "zstandard")

_ALL = """
import importlib.util, sys
from pathlib import Path
from tensortrace.replay import replay_case
import tensortrace.replay
assert tensortrace.replay.__file__.startswith(sys.prefix), tensortrace.replay.__file__
for module in ("tests", "fixtures", "docs", "examples"):
    assert importlib.util.find_spec(module) is None, module
for path in map(Path, sys.argv[1:]):
    found = replay_case(path)
    assert found, (path, found.deviations)
"""


def test_all_replay_in_a_virtual_environment_without_the_training_scripts(tmp_path: Path) -> None:
    """The four packages are copied into it, and their dependencies are those of this one."""
    made = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(made, check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "venv")}))
    for package in ("tracer", "diff", "replay", "cli"):
        shutil.copytree(ROOT / package, site / "tensortrace" / package)
    specs = [importlib.util.find_spec(name) for name in _DEPENDENCIES]
    folders = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
    (site / "dependencies.pth").write_text("\n".join(sorted(folders)))
    cases = [shutil.copy(path, tmp_path) for path in CASES]
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", _ALL, *map(str, cases)], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
