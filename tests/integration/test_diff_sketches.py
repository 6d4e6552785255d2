"""Diffs of traces at level sketch: same layout and others, with and without the other side's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.result import Result
from tensortrace.tracer.full_at import full_at
from tensortrace.tracer.types import Kind, Mesh, Promise
from tests import simulated
from tests.resharded import COPY, Held, Resharded
from tests.simulated import At, Documents, Program, Setup
from tests.synthetic import write_trace

SKETCH = Promise(level="sketch")


class Even(Program):
    """The program on rows of one length, wide enough that little is stored in full."""

    def documents(self, step: int) -> Documents:
        rng = np.random.default_rng(1000 + step)
        return [rng.integers(1, simulated.VOCABULARY, size=9) for _ in range(self.setup.rows)]


class Twice(Even):
    """The gradients of ranks are summed where they should be averaged."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        wrong = at.kind == Kind.REDUCED_GRAD and at.step == 1
        return 2 * value if wrong else value


class Shifted(Even):
    """Every row of an activation is off by the same vector, which is a difference of rank one."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if at.step != 1 or (at.kind, at.name, at.slot) != (Kind.ACTIVATION, "hidden", "out"):
            return value
        return (value + 0.3 * np.sin(np.arange(value.shape[-1]))).astype(value.dtype)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "WIDTH", 32)
    monkeypatch.setattr(simulated, "HIDDEN", 48)


def _split(at: At) -> Held:
    """Return how two tensor-parallel ranks hold a tensor: the hidden layer by its rows, the head's inputs."""
    if at.slot == "step":
        return COPY
    if at.name == "hidden.weight":
        return Held("shard", 0)
    if at.name == "head.weight":
        return Held("shard", 1)
    if at.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) and (at.name, at.slot) == ("hidden", "out"):
        return Held("shard", 2)
    return COPY


Writer = Callable[[Path, Promise], Path]


def _program(program: Program) -> Writer:
    return lambda root, promise: program.write(root, promise=promise)


def _parts(program: Program) -> Writer:
    return lambda root, promise: Resharded(program, 2, _split).write(root, promise=promise)


LAYOUTS: dict[str, Callable[[], Writer]] = {
    "one rank": lambda: _program(Even(Setup(steps=2, order=3))),
    "two ranks": lambda: _program(Even(Setup(steps=2, ranks=2, order=1))),
    "two microbatches": lambda: _program(Even(Setup(steps=2, accumulate=2, order=1))),
    "in parts": lambda: _parts(Even(Setup(steps=2, order=1))),
    "two ranks in parts": lambda: _parts(Even(Setup(steps=2, ranks=2, order=1))),
}


def _pair(folder: Path, b: Writer, levels: tuple[Promise, Promise]) -> Result:
    a = Even(Setup(steps=2)).write(folder / "a", promise=levels[0])
    return compare(a, b(folder / "b", levels[1]))


CASES = [
    *((layout, (SKETCH, SKETCH)) for layout in LAYOUTS),
    ("two ranks in parts", (Promise(), SKETCH)),
    ("two ranks in parts", (SKETCH, Promise())),
]


@pytest.mark.parametrize(("layout", "levels"), CASES)
def test_correct_runs_are_equivalent_by_their_sketches(
    layout: str, levels: tuple[Promise, Promise], tmp_path: Path
) -> None:
    result = _pair(tmp_path, LAYOUTS[layout](), levels)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete


def test_a_factor_has_its_cause_at_level_sketch(tmp_path: Path) -> None:
    result = _pair(tmp_path, _program(Twice(Setup(steps=2, ranks=2, order=1))), (SKETCH, SKETCH))
    first = result.first_divergent
    assert first is not None
    assert first.metrics is not None
    assert (first.where.step, first.where.kind) == (1, "reduced_grad")
    assert result.causes
    assert result.causes[0].code == "scale.world_size"


def _wrong() -> Writer:
    return _program(Shifted(Setup(steps=2, ranks=2, order=1)))


def test_a_shift_of_all_rows_is_found_where_it_begins(tmp_path: Path) -> None:
    found = [
        _pair(
            tmp_path / name, _program(Shifted(Setup(steps=2, ranks=2, order=1))), (level, level)
        ).first_divergent
        for name, level in (("full", Promise()), ("sketch", SKETCH))
    ]
    full, sketched = found
    assert full is not None
    assert sketched is not None
    assert sketched.where == full.where
    assert full.metrics is not None
    assert sketched.metrics is not None
    assert sketched.metrics.estimated
    assert not full.metrics.estimated
    assert sketched.metrics.rel_l2 is not None
    assert sketched.metrics.rel_l2_error is not None
    off = abs(sketched.metrics.rel_l2 - (full.metrics.rel_l2 or 0.0))
    assert off <= sketched.metrics.rel_l2_error


@pytest.mark.parametrize("other", [Promise(level="stats"), Promise(level="sketch:8x8")])
def test_levels_without_a_common_measure_make_a_diff_incomplete(other: Promise, tmp_path: Path) -> None:
    result = _pair(tmp_path, LAYOUTS["two ranks"](), (SKETCH, other))
    assert result.verdict == "incomplete"
    assert result.first_divergent is None


def test_full_at_a_report_of_sketches_stores_what_the_diff_then_judges_by_its_values(tmp_path: Path) -> None:
    result = _pair(tmp_path / "sketched", _wrong(), (SKETCH, SKETCH))
    assert any("--full-at" in hint for hint in result.hints)
    report = tmp_path / "report.json"
    report.write_bytes(result.to_json())
    window = Promise(level="sketch", levels=full_at(report))
    again = _pair(tmp_path / "again", _wrong(), (window, window))
    first = again.first_divergent
    assert first is not None
    assert result.first_divergent is not None
    assert first.where == result.first_divergent.where
    assert first.metrics is not None
    assert not first.metrics.estimated
    assert not any("--full-at" in hint for hint in again.hints)


def test_sketches_of_a_stage_without_inputs_do_not_meet_those_that_go_by_samples(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 50, (4, 9))
    made = generator.standard_normal((4, 9, 16)).astype("f4")
    passed = {"kind": Kind.ACTIVATION, "name": "layers.1", "slot": "out"}
    given = ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, tokens)
    one, rounded = (
        (passed, made),
        (passed, (made * (1 + 1e-7 * generator.standard_normal(made.shape))).astype("f4")),
    )
    stages = {"pp": Mesh(("pp",), (2,), (0, 1))}
    write_trace(tmp_path / "a", [[given, one]], promise=SKETCH)
    write_trace(tmp_path / "b", [[given], [rounded]], meshes=stages, promise=SKETCH)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "incomplete"
    write_trace(tmp_path / "c", [[given, rounded]], promise=SKETCH)
    assert compare(tmp_path / "a", tmp_path / "c").verdict == "equivalent"


def test_equal_bits_are_not_asked_of_sketches(tmp_path: Path) -> None:
    a, b = (
        Even(Setup(steps=2, ranks=ranks)).write(tmp_path / str(ranks), promise=SKETCH) for ranks in (1, 2)
    )
    result = compare(a, b, options=CompareOptions(policy="exact"))
    estimated = [o for o in result.origins if o.metrics is not None and o.metrics.estimated]
    assert not estimated
    assert not result.coverage.complete
