"""Commands of a matrix, and where a run's modules come from."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tensortrace.replay.validate.cells import ONLY, expand
from tensortrace.replay.validate.imports import environment
from tensortrace.tracer.errors import BadRequest


def test_a_matrix_is_every_combination() -> None:
    cells = expand(["run", "-n{n}", "--dtype={d}"], ["n=1,2", "d=fp32,bf16"])
    assert [cell.command for cell in cells] == [
        ("run", "-n1", "--dtype=fp32"), ("run", "-n1", "--dtype=bf16"),
        ("run", "-n2", "--dtype=fp32"), ("run", "-n2", "--dtype=bf16"),
    ]  # fmt: skip
    assert [cell.name for cell in cells] == ["n=1-d=fp32", "n=1-d=bf16", "n=2-d=fp32", "n=2-d=bf16"]
    assert expand(["run"], []) == ((ONLY, ("run",)),)


def test_the_name_of_a_cell_is_no_path() -> None:
    (cell,) = expand(["run", "{f}"], ["f=../../etc/x y"])
    assert cell.command == ("run", "../../etc/x y")
    assert "/" not in cell.name


@pytest.mark.parametrize("matrix", [["n"], ["n="], ["=1"], ["m=1"], ["n=1", "n=2"], ["n=a/,a!"], ["a b=1"]])
def test_a_matrix_that_is_none_is_refused(matrix: list[str]) -> None:
    with pytest.raises(BadRequest, match="matrix"):
        expand(["run", "{n}"], matrix)


@pytest.mark.parametrize("how", ["path", "finder", "variable"])
def test_modules_of_the_checkout_come_from_the_other_tree(tmp_path: Path, how: str) -> None:
    """However the checkout got onto the path of the interpreter that a command runs."""
    for tree in ("checkout", "commit"):
        (tmp_path / tree / "src" / "own").mkdir(parents=True)
        (tmp_path / tree / "src" / "own" / "__init__.py").write_text(f"WHERE = {tree!r}")
    place = tmp_path / "env"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    environ = {"PATH": f"{place / 'bin'}{os.pathsep}{os.defpath}"}
    site = next((place / "lib").glob("python*/site-packages"))
    source = tmp_path / "checkout" / "src"
    if how == "path":
        (site / "own.pth").write_text(f"{source}\n")
    elif how == "variable":
        environ["PYTHONPATH"] = str(source)
    else:  # as setuptools installs what is not laid out like its packages
        (site / "__editable___own_finder.py").write_text(FINDER.format(own=str(source / "own")))
        (site / "own.pth").write_text("import __editable___own_finder as f; f.install()\n")
    moved = environment(["python", "train.py"], environ, tmp_path / "checkout", tmp_path / "commit")
    told = [
        subprocess.run(
            [python, "-c", "import own; print(own.WHERE)"], env=env, capture_output=True, text=True
        )
        for env in (environ, moved)
    ]
    assert [each.stdout.strip() for each in told] == ["checkout", "commit"], [each.stderr for each in told]


FINDER = """
import sys
from importlib.util import spec_from_file_location

MAPPING = {{"own": {own!r}}}


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")


def install():
    sys.meta_path.append(Finder)
"""


def test_what_is_not_of_the_checkout_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for folder in (other, tmp_path / "checkout", tmp_path / "commit"):
        folder.mkdir()
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(other)}
    moved = environment([sys.executable], environ, tmp_path / "checkout", tmp_path / "commit")
    assert moved["PYTHONPATH"].split(os.pathsep)[-1] == str(other)
    assert str(tmp_path / "commit") not in moved["PYTHONPATH"]
