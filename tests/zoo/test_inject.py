"""What is planted at one boundary is there, there alone, and found there first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.reader import Trace, check
from tests.integration.judged import first, judge_in, origins
from tests.simulated import Program
from tests.zoo.inject import Place, inject, inject_noise

PLACE = Place(1, "local_grad", "hidden.weight", "grad")


def _entries(path: Path) -> list[tuple[object, np.ndarray]]:
    with Trace.open(path) as trace:
        return [(e.key, rank.read(e)) for rank in trace.ranks for e in rank.entries]


def test_one_boundary_is_scaled_on_every_rank_and_nothing_else_changes(tmp_path: Path) -> None:
    trace = judge_in(tmp_path).write(Program(ranks=2, steps=2))
    assert inject(trace, tmp_path / "out", PLACE, 0.01) == 4  # a microbatch and the window, on two ranks
    assert list(check(tmp_path / "out")) == []
    for (key, before), (other, after) in zip(_entries(trace), _entries(tmp_path / "out"), strict=True):
        assert key == other
        factor = 1.01 if PLACE.name == key.name and key[2:5:2] == ("local_grad", "grad") else 1.0  # type: ignore
        factor = factor if key.step == PLACE.step else 1.0  # type: ignore[attr-defined]
        np.testing.assert_allclose(after, before * factor, rtol=3e-7)


def test_what_is_scaled_is_the_one_origin(tmp_path: Path) -> None:
    judge = judge_in(tmp_path)
    trace = judge.write(Program(ranks=2, steps=2))
    inject(trace, tmp_path / "out", PLACE, 0.01)
    result = judge(trace, tmp_path / "out")
    assert (first(result).where.kind, first(result).where.name) == ("local_grad", "hidden.weight")
    assert {kind for kind, _ in origins(result)} <= {"local_grad", "reduced_grad", "clipped_grad"}


def test_noise_has_the_size_asked_for(tmp_path: Path) -> None:
    trace = judge_in(tmp_path).write(Program(steps=1))
    inject_noise(trace, tmp_path / "out", Place(0, "activation", "hidden", "out"), 1e-3)
    pairs = zip(_entries(trace), _entries(tmp_path / "out"), strict=True)
    errors = [
        np.linalg.norm(b - a) / np.linalg.norm(a) for (_, a), (_, b) in pairs if not np.array_equal(a, b)
    ]
    assert errors == pytest.approx([1e-3], rel=1e-3)


def test_a_boundary_that_is_not_there_is_refused(tmp_path: Path) -> None:
    trace = judge_in(tmp_path).write(Program(steps=1))
    with pytest.raises(ValueError, match="no tensor at"):
        inject(trace, tmp_path / "out", Place(0, "activation", "nowhere", "out"), 0.01)
