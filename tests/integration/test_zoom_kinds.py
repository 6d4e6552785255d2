"""Kinds of mistakes inside modules of 20 and more operations, each made by changing a program's text.

Every operation must be named with the changed line, or with a line that the changed one called.
"""

from __future__ import annotations

import difflib
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tensortrace.diff import engine
from tensortrace.tracer.in_process import record
from tests import harness

FOLDER = harness.TRAINING / "operations"
MODEL, PIECES = "operations.py", "pieces.py"
ZOOM = ("attn", "mlp", "cell", "moe")

PLANTS = {
    "constant": (MODEL, "spread + 1e-3", "spread + 1e-2"),
    "dim": (MODEL, "e.sum(-1, keepdim=True)", "e.sum(-2, keepdim=True)"),
    "range-dtype": (PIECES, "width, 2, dtype=torch.float32", "width, 2, dtype=torch.bfloat16"),
    "fill": (MODEL, "seen[:, None, None, :], -1e9", "seen[:, None, None, :], -1.0"),
    "slice": (MODEL, "x[:, :1], x[:, :-1]), 1", "x[:, :1], x[:, 1:]), 1"),
    "view": (MODEL, "k = k.view(b, t, -1, HEAD).transpose(1, 2)", "k = k.view(b, -1, t, HEAD)"),
    "swapped": (MODEL, "scores = q @ k.transpose", "scores = k @ q.transpose"),
    "chunks": (MODEL, "ir, iz, ii = inner", "iz, ir, ii = inner"),
    "gate": (MODEL, "(1 - z) * n + z * h", "(1 - z) * h + z * n"),
    "where": (MODEL, "part > 0, total, last", "part > 0, last, total"),
    "residual": (MODEL, "return total + x", "return total + last"),
    "argument": (MODEL, "k = pieces.rms(k, 1.0)", "k = pieces.rms(q, 1.0)"),
    "einsum": (MODEL, '"bhqk,bhkd->bhqd"', '"bhkq,bhkd->bhqd"'),
    "moved": (
        MODEL, "torch.softmax(best, -1)", "torch.softmax(scores, -1).gather(-1, chosen)",
    ),
    "activation": (MODEL, ', approximate="tanh"', ""),
    "missing": (MODEL, "        k = pieces.rms(k, 1.0)\n", ""),
    "extra": (MODEL, "mixed = curved * up\n", "mixed = curved * up * 1.02\n"),
    "view-written": (MODEL, "wide = level.float()\n", "wide = level.float()\n        wide[:, 0] *= 0.5\n"),
    "precision": (MODEL, "e = torch.exp(scores - top)", "e = torch.exp((scores - top).bfloat16()).float()"),
    "no-detach": (MODEL, "mixed.detach().abs()", "mixed.abs()"),
    "detach": (MODEL, "share = torch.softmax(best, -1)", "share = torch.softmax(best, -1).detach()"),
    "data": (MODEL, "torch.tanh(ii + r * hi)", "torch.tanh(ii + r.data * hi)"),
    "backward": (MODEL, "pieces.Rounded.apply(mixed)", "pieces.Rounded2.apply(mixed)"),
    "hook": (
        MODEL, "        mixed = curved * up\n",
        "        mixed = curved * up; mixed.register_hook(lambda g: g * 1.1)\n",
    ),
}  # fmt: skip

LEGAL = {
    "fused": (
        MODEL, "        e = torch.exp(scores - top)\n        p = e / e.sum(-1, keepdim=True)",
        "        p = torch.softmax(scores, -1)",
    ),
    "matmul": (MODEL, 'torch.einsum("bhqk,bhkd->bhqd", p, v)', "p @ v"),
    "linear": (MODEL, "F.linear(x[:, step], self.wi, self.b)", "x[:, step] @ self.wi.T + self.b"),
    "in-place": (MODEL, "mixed = mixed / limit", "mixed = mixed.div_(limit)"),
    "lerp": (MODEL, "(1 - z) * n + z * h", "torch.lerp(n, h, z)"),
}  # fmt: skip

BACKWARD = """

class Rounded2(Rounded):
    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 0.5)
"""


def written(folder: Path, file: str = MODEL, old: str = "", new: str = "") -> Path:
    """Write the program, one text of it changed."""
    folder.mkdir()
    for name in (MODEL, PIECES):
        text = (FOLDER / name).read_text() + (BACKWARD if name == PIECES else "")
        if old and name == file:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def recorded(folder: Path, *change: str) -> Path:
    program = written(folder / "program", *change)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(program))
        for name in ("operations", "pieces"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with record(folder / "trace", zoom=ZOOM, strict=True):
            import_module("operations").train()
        for name in ("operations", "pieces"):
            monkeypatch.delitem(sys.modules, name, raising=False)
    return folder / "trace"


def changed(a: Path, b: Path) -> set[str]:
    """Return ``file.py:12`` of every line that is in one of the programs alone."""
    found: set[str] = set()
    for name in (MODEL, PIECES):
        left, right = ((trace.parent / "program" / name).read_text().splitlines() for trace in (a, b))
        for tag, i, j, k, n in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            if tag != "equal":
                found |= {f"{name}:{line + 1}" for line in (*range(i, j), *range(k, n))}
    return found


@pytest.fixture(scope="module")
def a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("a"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTS)
def test_the_changed_line_is_named(a: Path, tmp_path: Path, kind: str) -> None:
    b = recorded(tmp_path, *PLANTS[kind])
    result = engine.compare(a, b)
    assert result.verdict == "divergent"
    assert result.operation is not None
    named = set(re.findall(r"\w+\.py:\d+", result.operation.text))
    assert named & changed(a, b), result.operation.text


@pytest.mark.slow
@pytest.mark.parametrize("rewrite", LEGAL)
def test_a_legal_rewrite_is_equivalent(a: Path, tmp_path: Path, rewrite: str) -> None:
    result = engine.compare(a, recorded(tmp_path, *LEGAL[rewrite]))
    assert result.verdict == "equivalent"
    assert result.operation is None
