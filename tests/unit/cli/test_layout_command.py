"""``trace layout --check`` says in a line each what is wrong with a file or with what ranks hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli.main import run
from tensortrace.tracer.types import Kind
from tests.synthetic import Tensor, write_trace

W = np.arange(48, dtype=np.float32).reshape(12, 4)

GOOD = """format = 1
axes = { tp = 2 }
rule = [
{ name = "w", dims = "o[tp] i" },
{ name = "n", dims = "h same:tp" },
{ name = "m", dims = "b h[tp]" }]
"""


def param(name: str, value: np.ndarray) -> Tensor:
    return {"kind": Kind.PARAM, "name": name, "slot": "model", "step": -1, "microbatch": None}, value


def output(value: np.ndarray) -> Tensor:
    return {"kind": Kind.ACTIVATION, "name": "m", "slot": "out"}, value


PARTS = {
    "right": [
        [param("w", W[:6]), param("n", W[0]), output(W[:4, :2])],
        [param("w", W[6:]), param("n", W[0]), output(W[:4, 2:])],
    ],
    "odd": [
        [param("w", W[:6]), param("n", W[0]), output(W[:4, :2])],
        [param("w", W[6:]), param("n", W[1]), output(W[:4, 2:])],
    ],
    "lacking": [
        [param("w", W[:6]), param("n", W[0]), output(W[:4, :2])],
        [param("n", W[0]), output(W[:4, 2:])],
    ],
    "uneven": [
        [param("w", W[:7]), param("n", W[0]), output(W[:4, :2])],
        [param("w", W[7:]), param("n", W[0]), output(W[:4, 2:])],
    ],
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_trace(folder / "a", [[param("w", W), param("n", W[0]), output(W[:4])]])
    for name, ranks in PARTS.items():
        write_trace(folder / name, ranks)
    (folder / "empty").mkdir()
    return folder


def checked(
    traces: Path, text: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, tuple[str, ...]]:
    """Return the exit code and the lines, the last of which counts the problems."""
    file = traces / "layout.toml"
    file.write_text(text)
    code = run(["layout", "--check", str(file), str(traces / "a"), str(traces / trace)])
    shown = capsys.readouterr()
    return code, tuple((shown.out + shown.err).replace(f"{traces}/", "").splitlines())


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_what_fits_says_so(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(traces, GOOD, "right", capsys) == (0, ("layout.toml: fits right",))


NO_FILE = [
    ("nothing", "layout.toml: not TOML: "),
    (changed("format = 1", "format = 2"), "layout.toml: format, found 2, expected 1"),
    (changed("o[tp]", "o[ep]"), "rule 1 (w): dims: unknown axis ep, expected one of tp; declare"),
    (changed("h same:tp", "h"), "rule 2 (n): dims: axis tp of 2 ranks is not mentioned; split"),
    (changed("o[tp] i", "o[tp] i[tp]"), "dims: 'o[tp] i[tp]': axis tp splits twice, expected once"),
    (changed("o[tp] i", "o[tp,tp] i"), "dims: 'o[tp,tp] i': axis tp splits twice, expected once"),
    (changed("o[tp] i", "o[tp i"), "layout.toml: rule 1 (w): dims: 'o[tp i': found 'i', expected ']'"),
    (changed("tp = 2", "tp = -2"), "layout.toml: axes: tp, found -2, expected at least 1"),
    (changed("tp = 2", "tp = 4611686018427387904"), "expected at most 1048576"),
    (changed('"h same:tp"', '"h same:tp", gard = "h"'), "unknown field `gard` - at `rule 2`"),
    (changed('"h same:tp"', "3"), "Expected `str`, got `int` - at `rule 2.dims`"),
    (changed('"n"', '"{a}.{b}.{c}.{d}.{e}"'), "expected at most 4 numbers in braces"),
    (GOOD + 'rename = [{ from = "w", to = "x{n}" }]', "rename 1 (w): found {n}, which 'w' does not capture"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), NO_FILE)
def test_what_is_no_layout_file_is_trouble_told_in_a_line(
    traces: Path, text: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [told] = checked(traces, text, "right", capsys)
    assert code == 2
    assert line in told


@pytest.mark.parametrize("trace", ["nowhere", "empty"])
def test_what_is_no_trace_is_trouble(traces: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, [told] = checked(traces, GOOD, trace, capsys)
    assert code == 2
    assert f"{trace}: n" in told


SHAPE = "param w of shape (6, 4) on rank 0: dimension 0: found 6 elements, expected 7 on this rank"
OTHER = "expected (12, 4) as in the other trace"

UNFIT = [
    (changed("tp = 2", "tp = 4"), "right", ["axes: tp 4 make 4 ranks, expected 2"]),
    (changed("o[tp] i", "o i[tp]"), "right", [f"param w model: global shape (6, 8), {OTHER}"]),
    (changed('"o[tp] i"', '"(q|k)[tp] i", sizes = { q = 5, k = 7 }'), "right", [f"'(q|k)[tp] i': {SHAPE}"]),
    (changed("o[tp] i", "o i same:tp"), "right", [
        "init: param w model: ranks 0, 1: other values in [0:6, 0:4] than each other",
        f"init: param w model: global shape (6, 4), {OTHER}",
    ]),
    (changed("o[tp] i", "o[tp]"), "right", ["on rank 0: found 2 dimensions, expected 1"]),
    (changed('"n"', '"nn"'), "right", ["rule 2 (nn): name: 'nn' matches nothing in the trace"]),
    (changed('"o[tp] i"', '"o[tp] i", valid = { o = 10 }'), "right", [f"shape (10, 4), {OTHER}"]),
    (changed('"o[tp] i"', '"o[tp] i", to = { w = "x i" }'), "right", ["on rank 0: x is no factor of 'dims'"]),
    (changed('"b h[tp]"', '"b h[tp]", kind = ["param"]'), "right", [
        "step 0 microbatch 0: activation m out: ranks 0, 1 hold different tensors and no rule is of them",
    ]),
    (GOOD, "odd", ["init: param n model: ranks 0, 1: other values in [0:4] than each other"]),
    (GOOD, "lacking", ["init: param w model: no rank holds [6:12, 0:4] (rank 0 hold other parts)"]),
    (GOOD, "uneven", ["w model: rank 1: found global shape (10, 4), others have global shape (14, 4)"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "trace", "lines"), UNFIT)
def test_what_does_not_fit_is_told_with_ranks_and_ranges(
    traces: Path, text: str, trace: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = checked(traces, text, trace, capsys)
    assert code == 1
    assert len(told) == len(lines) + 1, told
    for wanted, line in zip(lines, told, strict=False):
        assert wanted in line
    assert told[-1].startswith("layout.toml: does not fit: ")


def test_a_glob_looks_at_a_name_once_however_many_stars_it_has(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(traces / "long", [[param("a" * 250, W)], [param("a" * 250, W)]])
    code, _ = checked(traces, GOOD.replace('"n"', '"' + "*a" * 60 + 'x"'), "long", capsys)
    assert code == 1
