"""Tests of running a command: its exit code, its signals, its output folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tensortrace.tracer import launch
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.settings import VARIABLE, Settings, decode

PYTHON = sys.executable


def run(root: Path, *command: str, **settings: object) -> launch.Outcome:
    wanted = Settings(root=str(root), **settings)  # type: ignore[arg-type]
    return launch.run(command, wanted, environ=os.environ, observe=lambda ranks: None)


def manifest(root: Path) -> dict[str, object]:
    return msgspec.json.decode((root / "trace.json").read_bytes(), type=dict[str, object])


@pytest.mark.parametrize("code", [0, 1, 2, 7, 255])
def test_the_exit_code_is_the_commands_own(tmp_path: Path, code: int) -> None:
    root = tmp_path / "a"
    assert run(root, "/bin/sh", "-c", f"exit {code}").exit_code == code
    assert manifest(root)["exit_code"] == code


def test_death_by_a_signal_is_128_plus_its_number(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "/bin/sh", "-c", "kill -9 $$").exit_code == 137


def test_the_command_sees_the_settings_and_our_folder_first_on_its_path(tmp_path: Path) -> None:
    settings = Settings(root="/t")
    environ = launch.child_environ(settings, {"PYTHONPATH": "/mine", "HOME": "/h"})
    assert environ["PYTHONPATH"] == f"{launch.INJECT}{os.pathsep}/mine"
    assert environ["HOME"] == "/h"
    assert decode(environ[VARIABLE]) == settings


def test_without_a_pythonpath_the_working_folder_does_not_slip_in(tmp_path: Path) -> None:
    assert launch.child_environ(Settings(root="/t"), {})["PYTHONPATH"] == str(launch.INJECT)
    assert launch.child_environ(Settings(root="/t"), {"PYTHONPATH": ""})["PYTHONPATH"] == str(launch.INJECT)


def test_the_injected_folder_holds_nothing_but_sitecustomize() -> None:
    assert [path.name for path in launch.INJECT.iterdir() if path.name != "__pycache__"] == [
        "sitecustomize.py"
    ]


def test_an_output_that_exists_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "something").write_text("x")
    with pytest.raises(BadRequest, match="exists"):
        run(tmp_path / "a", "/bin/sh", "-c", f"touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_force_removes_a_trace_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "a"
    run(root, "/bin/true")
    (root / "rank00001").mkdir()
    (root / "rank00001" / "index.jsonl").write_text("")
    launch.clear(root)
    assert list(root.iterdir()) == []
    (root / "notes.txt").write_text("mine")
    with pytest.raises(BadRequest, match=r"notes\.txt"):
        launch.clear(root)
    assert (root / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("name", "code"), [("no-such-command", 127), ("./not-executable", 126)])
def test_a_command_that_cannot_start_leaves_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-executable").write_text("x")
    with pytest.raises(launch.CannotStart, match=name) as caught:
        run(tmp_path / "a", name)
    assert caught.value.exit_code == code
    assert not (tmp_path / "a").exists()


def test_a_file_that_the_system_cannot_execute_leaves_no_output(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    with pytest.raises(launch.CannotStart) as caught:
        run(tmp_path / "a", str(program))
    assert caught.value.exit_code == 126
    assert not (tmp_path / "a").exists()


def test_a_program_of_the_working_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path / "a", "./train").exit_code == 0


def test_credentials_in_the_command_are_not_written_down(tmp_path: Path) -> None:
    run(tmp_path / "a", "/bin/true", "--api-key", "topsecret")
    assert "topsecret" not in (tmp_path / "a" / "trace.json").read_text()


def test_a_dry_run_makes_no_folder(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "/bin/true", dry_run=True).exit_code == 0
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_the_command(tmp_path: Path, number: int) -> None:
    program = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda number, frame: sys.exit(40 + number % 10))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    launcher = (
        "import os, signal, sys\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # nohup and shells leave it ignored
        "from tensortrace.tracer import launch\n"
        "from tensortrace.tracer.settings import Settings\n"
        f"settings = Settings(root={str(tmp_path / 'a')!r})\n"
        f"command = [sys.executable, '-S', '-c', {program!r}]\n"
        "outcome = launch.run(command, settings, environ=os.environ, observe=lambda ranks: None)\n"
        "sys.exit(outcome.exit_code)\n"
    )
    child = subprocess.Popen(
        [PYTHON, "-c", launcher], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.wait(60) == 40 + number % 10


def test_a_layout_file_is_in_the_trace_before_ranks_start_and_they_are_told(tmp_path: Path) -> None:
    root, text = tmp_path / "a", b"format = 1\n[axes]\ntp = 2\n"
    script = f'echo "${VARIABLE}" > {tmp_path}/settings; cp {root}/layout.toml {tmp_path}/seen'
    launch.run(
        ["/bin/sh", "-c", script], Settings(root=str(root), layout="/elsewhere/layout.toml"),
        environ=os.environ, observe=lambda ranks: None, described=text,
    )  # fmt: skip
    assert (tmp_path / "seen").read_bytes() == text
    assert decode((tmp_path / "settings").read_text()).layout == str(root / "layout.toml")


def test_a_command_that_cannot_start_leaves_no_layout_file(tmp_path: Path) -> None:
    broken = tmp_path / "program"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o755)
    wanted = Settings(root=str(tmp_path / "a"))
    with pytest.raises(launch.CannotStart):
        launch.run([str(broken)], wanted, environ=os.environ, observe=lambda ranks: None, described=b"")
    assert not (tmp_path / "a").exists()
