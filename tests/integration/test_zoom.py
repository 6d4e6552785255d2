"""``--zoom``: the operation and the line at which two runs part, without changing a bit of the training."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tensortrace.diff import engine
from tensortrace.diff.result import Operation, Result
from tensortrace.tracer.in_process import record
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests import harness

PROGRAM = harness.TRAINING / "zoomed.py"
LAYOUT = harness.TRAINING / "layouts" / "zoomed.toml"
ZOOM = ("--zoom", "blocks.1.*", "--steps", "0")

FOUND = {
    "rope-dtype": ("aten.arange", "inverse = 1.0 / (100.0", "rotations"),
    "scale": ("aten.mul.Tensor", "scores = scores * scale", "attend"),
    "no-detach": ("aten.detach.default", 'kept = x if self.plant == "no-detach" else x.detach()', "size"),
    "mask": ("aten.triu.default", "future = torch.ones(", "attend"),
    "sign": ("aten.mul.Tensor", "turned = torch.stack((even * cos + sign", "rotate"),
}
"""What is planted: the operation, how its line begins, and the function that the line is in."""

DIFFERS = {
    "rope-dtype": ("dtype bfloat16 in b, float32 in a",),
    "scale": (f"other {32**-0.5!r} in b, {8**-0.5!r} in a",),
    "no-detach": (),
    "mask": ("diagonal 2 in b, 1 in a",),
    "sign": ("other 1.0 in b, -1.0 in a",),
}


def line_of(text: str) -> str:
    """Return ``zoomed.py:41`` of the line that holds a text."""
    lines = PROGRAM.read_text().splitlines()
    return f"{PROGRAM.name}:{next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))}"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoomed", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["zoomed.py", *map(str, arguments)])
    program().main()


def recorded(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, *arguments: object, zoom: str = "blocks.1.*"
) -> Path:
    with record(folder / name, zoom=[zoom], strict=True):
        train(monkeypatch, "--steps", 1, *arguments)
    return folder / name


def compared(a: Path, b: Path) -> Result:
    return engine.compare(a, b)


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield recorded(monkeypatch, tmp_path_factory.mktemp("zoom"), "a")


def assert_found(plant: str, operation: Operation | None) -> None:
    assert operation is not None
    name, text, function = FOUND[plant]
    named = operation.operation_a if plant == "no-detach" else operation.operation_b
    place = operation.source_a if plant == "no-detach" else operation.source_b
    assert named is not None
    assert named.startswith(name)
    assert place == f"{line_of(text)} in {function}"
    assert operation.differs[:1] == DIFFERS[plant]
    assert operation.module == ("blocks.1.mlp" if plant == "no-detach" else "blocks.1.attn")


SLOW = ("mask", "sign")


@pytest.mark.parametrize(
    "plant", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in FOUND]
)
def test_the_operation_and_its_line_are_named(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    b = recorded(monkeypatch, tmp_path, "b", "--plant", plant)
    result = compared(a, b)
    assert result.verdict == "divergent"
    assert_found(plant, result.operation)
    assert result.operation is not None
    assert result.operation.text in result.headline


def test_an_inserted_operation_does_not_shift_the_rest(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = recorded(monkeypatch, tmp_path, "same", "--write", "inserted")
    assert compared(a, same).verdict == "equivalent"
    b = recorded(monkeypatch, tmp_path, "b", "--write", "inserted", "--plant", "scale")
    assert_found("scale", compared(a, b).operation)


def test_fused_and_decomposed_attention_meet_at_the_ends(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = recorded(monkeypatch, tmp_path, "b", "--write", "fused")
    assert compared(a, b).verdict == "equivalent"
    wrong = recorded(monkeypatch, tmp_path, "wrong", "--write", "fused", "--plant", "scale")
    operation = compared(a, wrong).operation
    assert operation is not None
    assert operation.operation_b is not None
    assert "scaled_dot_product" in operation.operation_b
    assert "operations from" in operation.text  # those of a that it stands for
    rope = recorded(monkeypatch, tmp_path, "rope", "--write", "fused", "--plant", "rope-dtype")
    assert_found("rope-dtype", compared(a, rope).operation)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["reentrant", "not"])
def test_a_gradient_is_traced_through_a_checkpoint(
    a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """They belong to the recomputed operations of a reentrant checkpoint, to the first ones otherwise."""
    same = recorded(monkeypatch, tmp_path, "same", "--recompute", recompute)
    assert compared(a, same).verdict == "equivalent"
    b = recorded(monkeypatch, tmp_path, "b", "--recompute", recompute, "--plant", "no-detach")
    assert_found("no-detach", compared(same, b).operation)


def test_without_zoom_the_hint_says_what_to_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = recorded(monkeypatch, tmp_path, "a", zoom="blocks.0.mlp")
    b = recorded(monkeypatch, tmp_path, "b", "--plant", "scale", zoom="blocks.0.mlp")
    result = compared(a, b)
    assert result.operation is None
    assert any("trace record --zoom blocks.1.attn --zoom-steps 0" in hint for hint in result.hints)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--recompute", "reentrant"),
        pytest.param(("--recompute", "not"), marks=pytest.mark.slow),
        pytest.param(("--dtype", "bf16"), marks=pytest.mark.slow),
    ],
    ids=["plain", "reentrant", "non-reentrant", "autocast"],
)
def test_looking_into_every_module_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    train(monkeypatch, *arguments, "--hash-out", tmp_path / "alone")
    with record(tmp_path / "t", zoom=["*"], zoom_steps="0-9", strict=True):
        train(monkeypatch, *arguments, "--hash-out", tmp_path / "watched")
    assert json.loads((tmp_path / "watched").read_text()) == json.loads((tmp_path / "alone").read_text())
    [rank] = Trace.open(tmp_path / "t").ranks
    assert {e.step for e in rank.entries if e.kind is Kind.OPERATION} == {0, 1}
    assert any(e.kind is Kind.OPERATION_GRAD for e in rank.entries)


@pytest.mark.slow
@pytest.mark.parametrize("plant", FOUND)
def test_the_operation_is_named_over_two_ranks(tmp_path: Path, plant: str) -> None:
    """Heads and hidden units are split by hand: one rank against two, and two against two."""
    one = harness.record(tmp_path / "one", harness.python(PROGRAM, "--steps", 1), *ZOOM)
    two = harness.record(tmp_path / "two", harness.torchrun(2, PROGRAM, "--steps", 1), *ZOOM)
    wrong = harness.record(
        tmp_path / "wrong", harness.torchrun(2, PROGRAM, "--steps", 1, "--plant", plant), *ZOOM
    )
    assert harness.diff(one, two, "--layout", str(LAYOUT)).result.verdict == "equivalent"
    assert_found(plant, harness.diff(one, wrong, "--layout", str(LAYOUT)).result.operation)
    layouts = ("--layout-a", str(LAYOUT), "--layout", str(LAYOUT))
    assert_found(plant, harness.diff(two, wrong, *layouts).result.operation)
