"""What a program says of its tensors' layouts is honoured where axes are known, else said to be in vain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.audit import audit
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.relaid import laid_out
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.types import Mesh, Meta
from tests.synthetic import write_trace

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
TP = Mesh(("tp",), (2,), (0, 1))
GRID = Mesh(("dp", "tp"), (1, 2), (0, 1))


def recorded(folder: Path, text: str, meshes: dict[str, Mesh]) -> Trace:
    fields = {"name": "scores", "meta": Meta(text=f"layout: {text}")}
    parts = np.split(X, 2, axis=2)
    return Trace.open(write_trace(folder / "b", [[(fields, part)] for part in parts], meshes=meshes))


def whole(trace: Trace) -> np.ndarray:
    [[item]] = Catalog(trace).view(0).items.values()
    return item.read()


@pytest.mark.parametrize(
    "meshes", [{"x": TP}, {"grid": GRID}, {"grid": GRID, "other": Mesh(("cp",), (2,), (0, 1))}]
)
def test_the_axes_are_those_of_a_mesh_that_has_them(tmp_path: Path, meshes: dict[str, Mesh]) -> None:
    trace, vain = laid_out(recorded(tmp_path, "b s h[tp]", meshes), None)
    assert vain == ()
    assert np.array_equal(whole(trace), X)


FILE = 'format = 1\naxes = { tp = 2 }\nrule = [{ name = "%s", dims = "b s[tp] h" }]\n'


@pytest.mark.parametrize(("name", "shape"), [("*", (2, 3, 4)), ("scores", (2, 6, 2))])
def test_a_files_rule_goes_before_it_only_where_it_names_the_boundary(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    (tmp_path / "layout.toml").write_text(FILE % name)
    trace, _ = laid_out(recorded(tmp_path, "b s h[tp]", {}), tmp_path / "layout.toml")
    assert whole(trace).shape == shape


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b s h[tp", "found 'the end', expected ']'"),
        ("b h[tp]", "shape (2, 3, 2) on rank 0: found 3 dimensions, expected 2"),
        (
            "b s h[ep]",
            "no mesh of axes ep is known, expected 'mesh' beside 'layout' or a layout file that has them",
        ),
    ],
)
def test_what_says_nothing_is_told_once_and_stands_in_nobodys_way(
    tmp_path: Path, text: str, why: str
) -> None:
    trace, vain = laid_out(recorded(tmp_path, text, {"x": TP}), None)
    assert vain == (f"layout {text!r} of scores is not honoured: {why}",)
    assert [entry.shard for rank in trace.ranks for entry in rank.entries] == [None, None]


def test_a_check_of_a_layout_honours_it_too(tmp_path: Path) -> None:
    trace = recorded(tmp_path, "b s h[tp]", {})
    layout = RunLayout.parse(b"format = 1\naxes = { tp = 2 }\n", tmp_path / "layout.toml")
    assert audit(trace, layout) == []
