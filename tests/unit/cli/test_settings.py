"""``[tool.tensortrace.COMMAND]`` in pyproject.toml sets what the command line does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensortrace.cli import main
from tensortrace.diff import engine
from tensortrace.diff.result import Result
from tensortrace.tracer.types import Kind
from tests.unit.cli.samples import EQUIVALENT


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[engine.CompareOptions]:
    """Work in an empty folder, let every comparison find equivalence, and return what each was asked."""
    calls: list[engine.CompareOptions] = []

    def compare(a: Path, b: Path, *, options: engine.CompareOptions, progress: Any) -> Result:
        calls.append(options)
        return EQUIVALENT

    monkeypatch.setattr(engine, "compare", compare)
    monkeypatch.chdir(tmp_path)
    return calls


def diff(settings: str, *options: str) -> int:
    Path("pyproject.toml").write_text(settings)
    return main.run(["diff", "a", "b", *options])


def test_keys_are_the_flags_and_the_command_line_wins(asked: list[engine.CompareOptions]) -> None:
    settings = '[tool.tensortrace.diff]\nkinds = "param"\nexclude = ["x.*", "y"]\nexact = true\njobs = 3\n'
    assert diff(settings) == 0
    assert diff(settings, "--kinds", "loss", "--exclude", "z") == 0
    first, second = asked
    assert (first.kinds, first.exclude) == ((Kind.PARAM,), ("x.*", "y"))
    assert (first.policy, first.jobs) == ("exact", 3)
    assert (second.kinds, second.exclude, second.jobs) == ((Kind.LOSS,), ("z",), 3)


def test_what_the_file_set_is_said_on_stderr_as_options(
    asked: list[engine.CompareOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = '[tool.tensortrace.diff]\nkinds = "param"\nexclude = ["x y"]\nexact = true\n'
    assert diff(settings, "--kinds", "loss") == 0
    assert capsys.readouterr().err == "trace: pyproject.toml sets --exact --exclude 'x y'\n"
    assert diff(settings, "-q") == 0
    assert capsys.readouterr().err == ""


def test_a_flag_without_a_name_of_its_own_is_set_by_its_long_form(
    asked: list[engine.CompareOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff("[tool.tensortrace.diff]\nquiet = true\n") == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert diff("[tool.tensortrace.diff]\nquiet = true\n", "-v") == 0
    assert capsys.readouterr().out.count("\n") > 1


@pytest.mark.parametrize(
    ("settings", "place", "remedy"),
    [
        ('[tool.tensortrace.diff]\nkind = "param"', "[tool.tensortrace.diff] kind:", "did you mean kinds?"),
        ("[tool.tensortrace.dif]", "[tool.tensortrace] dif:", "did you mean diff?"),
        ('[tool.tensortrace]\nkinds = "param"', "[tool.tensortrace] kinds:", "write [tool.tensortrace.diff]"),
        ("[tool.tensortrace.diff]\njobs = 0", "[tool.tensortrace.diff] jobs,", "not in the range"),
        ('[tool.tensortrace.diff]\nkinds = ["param"]', "[tool.tensortrace.diff] kinds,", "one value"),
        ("[tool.tensortrace.diff]\nexact = 1", "[tool.tensortrace.diff] exact,", "true or false"),
        ("[tool.tensortrace.diff]\nkinds = {}", "[tool.tensortrace.diff] kinds,", "a string or a number"),
        ("[tool]\ntensortrace = 3", "tool.tensortrace,", "a table"),
        ("[tool.tensortrace.diff", "not TOML", ""),
    ],
)
def test_a_setting_that_means_nothing_is_one_line_that_names_file_key_and_remedy(
    asked: list[engine.CompareOptions],
    capsys: pytest.CaptureFixture[str],
    settings: str,
    place: str,
    remedy: str,
) -> None:
    assert diff(settings) == 2
    said = capsys.readouterr().err
    assert said.startswith("trace: error: pyproject.toml: " + place)
    assert remedy in said
    assert (said.count("\n"), asked) == (1, [])


def test_a_flag_may_be_set_to_false_which_is_not_said(
    asked: list[engine.CompareOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff("[tool.tensortrace.diff]\nexact = false\nquiet = false\n") == 0
    assert (asked[0].policy, capsys.readouterr().err) == ("error-model", "")


def test_tables_of_other_programs_and_of_other_commands_are_left_alone(
    asked: list[engine.CompareOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff('[tool.ruff]\nx = 1\n[tool.tensortrace.record]\nkinds = "param"\n') == 0
    assert (asked[0].kinds, capsys.readouterr().err) == ((), "")
