"""Tests of the injected sitecustomize, with a torch and a recorder that only say that they ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensortrace.tracer.launch import INJECT

STARTED = "recorder started with torch ready: True"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with stand-ins for torch and for our bootstrap."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("print('torch runs')\nready = True\n")
    (tmp_path / "torch" / "nn.py").write_text("x = 1\n")
    tracer = tmp_path / "tensortrace" / "tracer"
    tracer.mkdir(parents=True)
    (tmp_path / "tensortrace" / "__init__.py").write_text("")
    (tracer / "__init__.py").write_text("")
    (tracer / "bootstrap.py").write_text(
        "import sys\n"
        "def start():\n"
        "    print('recorder started with torch ready:', getattr(sys.modules['torch'], 'ready', False))\n"
    )
    return tmp_path


def python(site: Path, program: str, *, recorded: bool = True, before: str = "") -> list[str]:
    """Run a program with our folder first on PYTHONPATH and return its lines."""
    path = os.pathsep.join(part for part in (str(INJECT), before, str(site)) if part)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    if recorded:
        environ["TENSORTRACE_RECORD"] = "{}"
    outcome = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout.splitlines()


def test_the_recorder_starts_right_after_torch_has_run(site: Path) -> None:
    program = "print('user'); import torch; print('next')"
    assert python(site, program) == ["user", "torch runs", STARTED, "next"]


def test_without_the_variable_nothing_starts(site: Path) -> None:
    assert python(site, "import torch", recorded=False) == ["torch runs"]


def test_a_process_that_never_imports_torch_never_imports_us(site: Path) -> None:
    program = "import sys; print([name for name in sys.modules if name.startswith('tensortrace')])"
    assert python(site, program) == ["[]"]


def test_a_submodule_imported_first_starts_the_recorder_once(site: Path) -> None:
    assert python(site, "import torch.nn; import torch") == ["torch runs", STARTED]


def test_probing_for_torch_does_not_use_the_finder_up(site: Path) -> None:
    program = (
        "import importlib.util as u; spec = u.find_spec('torch'); print(bool(spec.origin)); "
        "print(spec.loader.is_package('torch')); import torch"
    )
    assert python(site, program) == ["True", "True", "torch runs", STARTED]


def test_torch_keeps_its_own_loader_and_the_finder_is_gone(site: Path) -> None:
    program = (
        "import sys, torch; print(type(torch.__loader__).__name__, type(torch.__spec__.loader).__name__); "
        "print([type(f).__name__ for f in sys.meta_path if type(f).__name__ == '_Torch'])"
    )
    assert python(site, program)[2:] == ["SourceFileLoader SourceFileLoader", "[]"]


def test_sys_path_is_as_without_us(site: Path) -> None:
    program = "import sys; print(sys.path)"
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site)}
    plain = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert python(site, program) == plain.stdout.splitlines()


def test_a_sitecustomize_that_we_hide_runs_and_is_the_one_that_is_imported(
    site: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("print('theirs'); mark = 1\n")
    program = "import sitecustomize; print(sitecustomize.mark, sitecustomize.__file__)"
    lines = python(site, program, before=str(theirs))
    assert lines == ["theirs", f"1 {theirs / 'sitecustomize.py'}"]


def test_a_hidden_sitecustomize_that_imports_torch_is_recorded_too(site: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import torch\n")
    assert python(site, "print('user')", before=str(theirs)) == ["torch runs", STARTED, "user"]


def test_a_torch_that_fails_to_import_can_be_imported_again(site: Path) -> None:
    (site / "torch" / "__init__.py").write_text(
        "import builtins\nif not hasattr(builtins, 'once'):\n    builtins.once = 1\n"
        "    raise ImportError('x')\n"
        "ready = True\n"
    )
    program = "try:\n    import torch\nexcept ImportError:\n    print('failed')\nimport torch"
    assert python(site, program) == ["failed", STARTED]


def test_a_python_without_tensortrace_says_so_and_runs(site: Path) -> None:
    (site / "tensortrace" / "tracer" / "bootstrap.py").unlink()
    outcome = subprocess.run(
        [sys.executable, "-c", "import torch; print('done')"],
        env={"PYTHONPATH": os.pathsep.join([str(INJECT), str(site)]), "TENSORTRACE_RECORD": "{}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert outcome.stdout.splitlines() == ["torch runs", "done"]
    assert outcome.returncode == 0
    assert outcome.stderr.count("\n") == 1
    assert "not recorded" in outcome.stderr
