"""What a shell is offered, and the scripts that make it ask."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.shell_completion import ShellComplete

from tensortrace.cli import main
from tensortrace.cli.completion import VARIABLE
from tests.synthetic import write_trace


def offered(*words: str) -> list[tuple[str, str]]:
    """Return (type, value) of what is offered for the last of these words."""
    asked = ShellComplete(main.group, {}, "trace", VARIABLE)
    return [(item.type, item.value) for item in asked.get_completions(list(words[:-1]), words[-1])]


def plain(*words: str) -> list[str]:
    found = offered(*words)
    assert {kind for kind, _ in found} <= {"plain"}
    return [value for _, value in found]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with two traces in ``runs``, beside a folder that is none."""
    for name in ("one", "two"):
        write_trace(tmp_path / "runs" / name, [[({}, np.zeros(2, np.float32))]])
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "case.zip").touch()
    monkeypatch.chdir(tmp_path)


def test_subcommands_and_options_are_offered() -> None:
    assert plain("comp") == ["compact", "completion"]
    assert plain("diff", "--allow") == ["--allow-missing"]
    assert plain("completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("command", [["diff", "--kinds"], ["show", "--kind"], ["record", "--kinds"]])
def test_kinds_are_offered_each_once_in_a_list(command: list[str]) -> None:
    assert plain(*command, "par") == ["param"]
    assert plain(*command, "param,lo") == ["param,loss", "param,local_grad"]
    assert plain(*command, "loss,lo") == ["loss,local_grad"]


def test_traces_are_offered_with_the_folders_beside_them(runs: None) -> None:
    assert plain("diff", "runs/") == ["runs/one", "runs/other/", "runs/two"]
    assert plain("diff", "runs/one", "runs/t") == ["runs/two"]
    assert plain("record", "--init-from", "runs/tw") == ["runs/two"]


def test_where_no_trace_fits_the_shell_finds_folders_or_packed_cases_too(runs: None) -> None:
    assert offered("diff", "ru") == [("dir", "ru")]
    assert offered("replay", "ca") == [("file", "ca")]
    assert offered("diff", "nowhere/x") == [("dir", "nowhere/x")]


def test_a_wrong_setting_does_not_keep_a_shell_from_completing(runs: None) -> None:
    Path("pyproject.toml").write_text("[tool.tensortrace.diff]\nno-such-key = 1\n")
    assert plain("diff", "--ex") == ["--exact", "--exclude", "--expect"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_asks_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}={shell}_complete" in script
    if shell == "bash":
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_the_program_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "trace rep")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        main.run([])
    assert capsys.readouterr().out.split() == ["plain,report", "plain,replay"]
