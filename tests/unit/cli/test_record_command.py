"""Tests of the command line of ``trace record``, with commands that need no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.cli.main import run
from tensortrace.tracer import launch
from tensortrace.tracer.manifest import read_manifest
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.settings import Settings


def outcome(code: int, *endings: str | None) -> launch.Outcome:
    ranks = tuple(RankProgress(f"rank{n:05d}", n, 0, 1, 1, None, ended) for n, ended in enumerate(endings))
    return launch.Outcome(code, ranks)


@pytest.mark.parametrize(
    ("ended", "strict", "dry_run", "code"),
    [
        (outcome(0, "finished"), False, False, 0),
        (outcome(7, "finished"), False, False, 7),
        (outcome(0), False, False, 2),
        (outcome(7), False, False, 7),
        (outcome(0), False, True, 0),
        (outcome(0, "failed: x"), False, False, 0),
        (outcome(0, "failed: x"), True, False, 2),
        (outcome(7, "failed: x"), True, False, 7),
    ],
)
def test_the_exit_code_is_the_commands_unless_that_hides_trouble(
    ended: launch.Outcome, strict: bool, dry_run: bool, code: int
) -> None:
    assert launch.exit_code(ended, Settings(root="/t", strict=strict, dry_run=dry_run)) == code


def test_options_of_the_command_are_the_commands_own(tmp_path: Path) -> None:
    file = tmp_path / "arguments"
    code = run(
        [
            "record",
            "-o",
            str(tmp_path / "a"),
            "/bin/sh",
            "-c",
            f'echo "$@" > {file}',
            "sh",
            "--steps",
            "3",
            "--force",
        ]
    )
    assert file.read_text() == "--steps 3 --force\n"
    assert code == 2, "it trained nothing"


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "x"],
        ["--kinds", "x"],
        ["--level", "x"],
        ["--buffer", "x"],
        ["--max-bytes", "x"],
        ["--min-free", "x"],
        ["--keep-last", "-1"],
        ["--trigger", "nonfinite"],
        ["--after", "2"],
        ["--trigger", "x", "--keep-last", "2"],
        ["--trigger", "SIGUSR1:3", "--keep-last", "2"],
        ["--trigger", "loss-spike:0", "--keep-last", "2"],
        ["--trigger", "", "--after", "2", "--keep-last", "2"],
        ["--trigger", "loss-spike", "--keep-last", "2", "--kinds", "param"],
        ["--max-bytes", "1GB", "--keep-last", "2"],
    ],
)
def test_a_malformed_option_is_one_line_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    ran = tmp_path / "ran"
    assert run(["record", "-o", str(tmp_path / "a"), *options, "--", "/usr/bin/touch", str(ran)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert any(option in said for option in options if option.startswith("--"))
    assert not ran.exists()
    assert not (tmp_path / "a").exists()


def test_an_existing_output_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert run(["record", "-o", str(tmp_path), "--", "/bin/true"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--force" in said
    assert (tmp_path / "file").read_text() == "mine"


def test_force_replaces_a_trace(tmp_path: Path) -> None:
    root = str(tmp_path / "a")
    assert run(["record", "-o", root, "--", "/bin/sh", "-c", "exit 4"]) == 4
    assert run(["record", "-o", root, "--", "/bin/sh", "-c", "exit 5"]) == 2
    assert run(["record", "-o", root, "--force", "--", "/bin/sh", "-c", "exit 5"]) == 5


def test_a_command_that_is_not_found_is_127_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["record", "-o", str(tmp_path / "a"), "--", "no-such-command"]) == 127
    assert capsys.readouterr().err == "trace: error: no-such-command: command not found\n"


def test_options_that_change_the_run_are_said_and_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "a"
    options = ["--adversarial", "--consistent-dropout", "3"]
    assert run(["record", "-o", str(root), *options, "--", "/bin/sh", "-c", "exit 4"]) == 4
    asked = "--consistent-init 0 --consistent-dropout 3 --adversarial"
    assert f"trace: {asked} changes the run" in capsys.readouterr().err
    flags = read_manifest(root / "trace.json").environment.flags
    assert flags == {
        "start.consistent-init": "0",
        "start.consistent-dropout": "3",
        "start.adversarial": "True",
    }


@pytest.mark.parametrize("options", [["--eager-attention"], ["--pad-id", "0"], ["--init-from", "/nowhere"]])
def test_options_of_the_start_that_make_no_sense_run_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    ran = tmp_path / "ran"
    assert run(["record", "-o", str(tmp_path / "a"), *options, "--", "/usr/bin/touch", str(ran)]) == 2
    assert options[0] in capsys.readouterr().err
    assert not ran.exists()


def test_a_buffer_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["record", "-o", str(tmp_path / "a"), "--buffer", "0", "/bin/true"]) == 2
    assert "option --buffer" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("format = 2", "layout.toml: format"),
        (
            "format = 1\n[axes]\ntp = 2\n[[rule]]\nname = 'w'\ndims = 'o i'",
            "layout.toml: rule 1 (w): dims: axis tp",
        ),
        ("nothing", "layout.toml: not TOML"),
    ],
)
def test_a_layout_file_that_is_none_ends_the_command_before_anything_starts(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layout.toml"
    file.write_text(text)
    code = run(["record", "-o", str(tmp_path / "a"), "--layout", str(file), "touch", str(tmp_path / "ran")])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1, lines
    assert complaint in lines[0]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "a").exists()


def test_the_layout_file_is_kept_in_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("format = 1\n[axes]\ntp = 2\n")
    assert run(["record", "-o", str(tmp_path / "a"), "--layout", str(file), "true"]) == 2, (
        "it trained nothing"
    )
    assert (tmp_path / "a" / "layout.toml").read_text() == file.read_text()


@pytest.mark.parametrize(("quiet", "lines"), [([], 2), (["-q"], 1)])
def test_a_quiet_recording_says_warnings_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: list[str], lines: int
) -> None:
    run(["record", "-o", str(tmp_path / "a"), *quiet, "--", "/bin/true"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert said[0].startswith("trace: warning: no process of the command trained anything")
