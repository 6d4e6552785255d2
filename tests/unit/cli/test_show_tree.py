"""``trace show --tree``: boundaries summed by modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli import main
from tensortrace.tracer.types import Kind
from tests.synthetic import write_trace

X = np.array([3.0, 4.0], np.float32)  # of norm 5, and 8 bytes
PARAM = {"microbatch": None, "kind": Kind.PARAM, "slot": "model"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rank = [
        ({**PARAM, "step": -1, "name": "net.block.0.w"}, X),
        ({"step": 0, "name": "net.block.0"}, X),
        ({"step": 0, "name": "net.block.1"}, X),
        ({**PARAM, "step": 0, "name": "net.block.0.w"}, X * 2),
        ({**PARAM, "step": 1, "name": "net.block.0.w"}, X * 3),
    ]
    return write_trace(tmp_path / "a", [rank, rank])


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[str]]:
    """Return the tree's rows by their labels, each with what stands behind the label."""
    assert main.run(["show", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    begin = next(n for n, line in enumerate(lines) if line.split()[:1] == ["name"])
    table = lines[begin + 1 : lines.index("", begin)]
    return {words[0]: words[1:] for line in table if (words := line.lstrip("│├└|`- ").split())}


def test_a_node_holds_what_is_below_it_and_its_own_norm(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(capsys, trace, "--tree")
    assert list(found) == ["net.block", "0", "w", "1", "total"]  # what has one child is one with it
    assert found["net.block"] == ["ap", "10", "80", "B", "2"]
    assert found["0"] == ["ap", "8", "64", "B", "2", "5"]
    assert found["w"] == ["-p", "6", "48", "B", "2", "15"]  # 3 · 5, after step 1
    assert found["1"] == ["a-", "2", "16", "B", "1", "5"]
    assert found["total"] == ["ap", "10", "80", "B", "2"]


def test_a_selection_narrows_the_tree(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    selection = ("--kind", "param", "--step", "0", "--rank", "1")
    assert rows(capsys, trace, "--tree", *selection) == {
        "net.block.0.w": ["p", "1", "8", "B", "1", "10"], "total": ["p", "1", "8", "B", "1"],
    }  # fmt: skip


def test_a_depth_sums_up_what_is_deeper_and_says_so(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(rows(capsys, trace, "--depth", "1")) == ["net.block.*", "total"]
    assert main.run(["show", str(trace), "--depth", "1"]) == 0
    assert ".*: what lies below 1 node is summed: --depth 2" in capsys.readouterr().out


def test_a_great_model_is_as_deep_as_fits_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"layers.{layer}.part{part}" for layer in range(50) for part in range(20)]
    path = write_trace(tmp_path / "big", [[({"name": name}, X) for name in names]])
    found = rows(capsys, path, "--tree")
    assert len(found) == 1 + 50 + 1  # the layers and each of them; with their parts 1,051
    assert found["49.*"] == ["a", "20", "160", "B", "1"]


def test_what_is_not_finite_stands_in_place_of_a_norm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = np.array([np.nan, 1, np.nan], np.float32)
    path = write_trace(tmp_path / "nan", [[({"name": "m"}, bad)]])
    assert rows(capsys, path, "--tree")["m"] == ["a", "1", "12", "B", "1", "2", "NaN"]


def test_a_stream_without_lines_gets_ascii(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensortrace.cli import show
    from tensortrace.cli.render.page import Look

    monkeypatch.setattr(show, "look_of", lambda _: Look(80, unicode=False))
    assert main.run(["show", str(trace), "--tree"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\n  |- 0 " in out
    assert "\n  |  `- w " in out


def test_a_name_of_thousands_of_parts_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [".".join("a" * depth) for depth in range(1, 1500, 7)]
    path = write_trace(tmp_path / "deep", [[({"name": name}, X) for name in names]])
    assert main.run(["show", str(path), "--depth", "2000"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 64


@pytest.mark.parametrize("option", [["--values"], ["--json", "-"]])
def test_a_tree_is_neither_values_nor_json(trace: Path, option: list[str]) -> None:
    assert main.run(["show", str(trace), "--tree", *option]) == 2
