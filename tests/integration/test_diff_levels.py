"""Diffs of traces that lack values: equal by digest, refuted by statistics, or not compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.tracer.types import Kind
from tests.levels import Line, with_statistics_only
from tests.simulated import At, Program, Setup


class Doubled(Program):
    """The hidden layer's activations, of which a later layer computes, are twice what they should be."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        wrong = at.step == 1 and (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "out")
        return 2 * value if wrong else value


def _all_floats(line: Line) -> bool:
    return "float" in line["dtype"] and line["kind"] not in ("input", "loss", "schedule")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same program on one and on two ranks, the former with a mistake as well, in full and not."""
    folder = tmp_path_factory.mktemp("levels")
    made = {"one": Program(Setup()), "two": Program(Setup(ranks=2, order=1)), "bad": Doubled(Setup())}
    found = {}
    for name, program in made.items():
        found[name] = program.write(folder / name)
        found[f"{name}.stats"] = with_statistics_only(found[name], folder / f"{name}.stats", _all_floats)
    return found


def test_a_run_without_values_is_equivalent_to_itself_by_its_digests(runs: dict[str, Path]) -> None:
    result = compare(runs["one"], runs["one.stats"])
    assert result.verdict == "equivalent"
    assert result.coverage.bitwise_equal == result.coverage.compared > 0


@pytest.mark.parametrize("levels", [("", ".stats"), (".stats", ""), (".stats", ".stats")])
def test_values_that_were_not_stored_make_a_diff_incomplete_and_name_the_level(
    runs: dict[str, Path], levels: tuple[str, str]
) -> None:
    result = compare(runs["one" + levels[0]], runs["two" + levels[1]])
    assert result.verdict == "incomplete"
    assert "level stats" in result.headline
    assert not result.origins
    lost = [m for m in result.coverage.missing if "values were not stored" in m.reason]
    assert {"activation", "param"} <= {m.kind for m in lost}
    assert any("--level full" in hint for hint in result.hints)


def test_statistics_refute_what_they_cannot_confirm(runs: dict[str, Path]) -> None:
    result = compare(runs["one.stats"], runs["bad.stats"])
    assert result.verdict == "divergent"
    first = result.first_divergent
    assert first is not None
    assert (first.where.step, first.where.name, first.where.slot) == (1, "hidden", "out")
    assert "by its statistics alone" in first.text
    assert first.metrics is not None
    assert first.metrics.rel_l2 == pytest.approx(1.0, rel=1e-6)  # the norm of 2x is off by that of x


def test_without_values_bits_that_differ_are_no_verdict_of_the_exact_policy(runs: dict[str, Path]) -> None:
    result = compare(runs["one.stats"], runs["two.stats"], options=CompareOptions(policy="exact"))
    assert result.verdict != "equivalent"
