"""``trace diff``: options, streams and exit codes, with the engine's outcome made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensortrace.cli import main
from tensortrace.diff import engine
from tensortrace.diff.result import Result
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind
from tests.unit.cli.samples import DIVERGENT, EQUIVALENT, INCOMPLETE

Calls = list[tuple[Path, Path, engine.CompareOptions]]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def answer(monkeypatch: pytest.MonkeyPatch, result: Result) -> Calls:
    """Let the engine return ``result``; return the list of what it was asked."""
    calls: Calls = []

    def compare(a: Path, b: Path, *, options: engine.CompareOptions, progress: Any) -> Result:
        calls.append((a, b, options))
        return result

    monkeypatch.setattr(engine, "compare", compare)
    return calls


@pytest.mark.parametrize(("result", "code"), [(EQUIVALENT, 0), (DIVERGENT, 1), (INCOMPLETE, 1)])
def test_the_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, result: Result, code: int) -> None:
    answer(monkeypatch, result)
    assert main.run(["diff", "a", "b"]) == code


def test_a_trace_error_is_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: object, **__: object) -> Result:
        raise BadRequest("a: no such folder")

    monkeypatch.setattr(engine, "compare", compare)
    assert main.run(["diff", "a", "b"]) == 2
    assert capsys.readouterr() == ("", "trace: error: a: no such folder\n")


def test_results_go_to_stdout_and_hints_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, DIVERGENT)
    main.run(["diff", "a", "b"])
    out, err = capsys.readouterr()
    assert out.startswith("DIVERGENT: ")
    assert "\x1b" not in out
    assert "next:" not in out
    assert err.splitlines()[-1].startswith("next: trace show runs/b")


def test_json_on_stdout_stands_alone_and_is_valid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, DIVERGENT)
    assert main.run(["diff", "a", "b", "--json", "-"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "tensortrace.diff/1"
    expected = {
        "step": 0, "microbatch": 0, "kind": "loss", "name": "cross_entropy", "slot": "weight", "call": 0,
        "ranks": [0, 1], "rel_l2": 0.35355,
    }  # fmt: skip
    assert expected.items() <= document["first_divergent"].items()


def test_json_holds_null_where_a_number_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, DIVERGENT)
    main.run(["diff", "a", "b", "--json", "-"])
    text = capsys.readouterr().out
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["origins"][1]["judgement"]["ratio"] is None


def test_a_path_that_json_cannot_hold_is_trouble_and_not_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side = msgspec.structs.replace(EQUIVALENT.a, path="runs/\udcff")
    answer(monkeypatch, msgspec.structs.replace(EQUIVALENT, a=side))
    assert main.run(["diff", "a", "b", "--json", "-"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main.run(["diff", "a", "b"]) == 0


@pytest.mark.parametrize(
    ("form", "begins"), [("markdown", "**DIVERGENT**: "), ("junit", "<?xml "), ("json", "{")]
)
def test_a_format_stands_on_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str, begins: str
) -> None:
    answer(monkeypatch, DIVERGENT)
    assert main.run(["diff", "a", "b", "--format", form]) == 1
    assert capsys.readouterr().out.startswith(begins)


def test_github_gets_annotations_and_its_step_a_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer(monkeypatch, DIVERGENT)
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.chdir(tmp_path)
    assert main.run(["diff", "a", "b", "--format", "github"]) == 1
    assert summary.read_text().startswith("**DIVERGENT**: ")
    out, err = capsys.readouterr()
    assert out.startswith("::error title=step 0")
    assert err == ""


@pytest.mark.parametrize("form", ["json", "markdown", "github"])
def test_two_results_on_stdout_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    calls = answer(monkeypatch, EQUIVALENT)
    assert main.run(["diff", "a", "b", "--format", form, "--json", "-"]) == 2
    assert f"--format {form}" in capsys.readouterr().err
    assert calls == []


def test_json_into_a_file_leaves_the_text_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer(monkeypatch, EQUIVALENT)
    path = tmp_path / "r.json"
    assert main.run(["diff", "a", "b", "--json", str(path)]) == 0
    assert json.loads(path.read_bytes())["verdict"] == "equivalent"
    assert capsys.readouterr().out.startswith("EQUIVALENT: ")


def test_an_existing_json_file_is_refused_before_anything_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = answer(monkeypatch, EQUIVALENT)
    path = tmp_path / "r.json"
    path.write_text("mine")
    assert main.run(["diff", "a", "b", "--json", str(path)]) == 2
    assert (calls, path.read_text()) == ([], "mine")
    assert main.run(["diff", "a", "b", "--json", str(path), "--force"]) == 0


def test_every_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, EQUIVALENT)
    options = ["--floor", "a2", "--floor", "a3", "--kinds", "param,loss", "--include", "h.*"]
    options += ["--jobs", "3"]
    main.run(["diff", "a", "b", *options, "--allow-missing", "ema.*", "--align", "b:0=a:100"])
    expected = engine.CompareOptions(
        policy="error-model", floor=(Path("a2"), Path("a3")), allow_missing=("ema.*",),
        kinds=(Kind.LOSS, Kind.PARAM), include=("h.*",), align="b:0=a:100", jobs=3,
    )  # fmt: skip
    assert calls == [(Path("a"), Path("b"), expected)]


def test_exact_is_a_policy_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, EQUIVALENT)
    assert main.run(["diff", "a", "b", "--exact"]) == 0
    assert calls[0][2].policy == "exact"
    assert main.run(["diff", "a", "b", "--exact", "--floor", "a2"]) == 2


def test_an_unknown_kind_is_trouble(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, EQUIVALENT)
    assert main.run(["diff", "a", "b", "--kinds", "gradients"]) == 2
    assert "reduced_grad" in capsys.readouterr().err


def test_quiet_prints_the_headline_and_no_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, DIVERGENT)
    main.run(["diff", "a", "b", "-q"])
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (1, "")


def test_force_color_colours_what_is_piped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    answer(monkeypatch, EQUIVALENT)
    main.run(["diff", "a", "b"])
    assert capsys.readouterr().out.startswith("\x1b[1;32mEQUIVALENT")
