"""Records the runs of the zoo, each once, and keeps their traces under a digest of all that makes them."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests import harness
from tests.zoo.case import PROGRAMS, Run
from tests.zoo.half_recorded import KINDS, LEFT_OUT

View = Literal["full", "half", "gradients", "sketch"]
"""What is recorded: everything; activations on even ranks; gradients and optimizer state; sketches of all."""

ALIKE = frozenset({"gradients", "sketch"})
"""Views in which runs on one rank are recorded as all others are."""

KINDS_OF_GRADIENTS = "local_grad,reduced_grad,unscaled_grad,clipped_grad,optimizer_state"

LIMIT_S = 300

HALF = Path(__file__).parent / "half_recorded.py"


class Broken(Exception):
    """A program, a recording or a diff that crashed or did not end: a row of the report, no end of it."""


def finish(command: Sequence[str], *, folder: Path, limit_s: float = LIMIT_S) -> harness.Finished:
    """Run a command to its end; after ``limit_s`` end it with all that it started, and raise Broken."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    search = os.pathsep.join([str(harness.BIN), inherited.get("PATH", os.defpath)])
    settings = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PATH": search}
    started = subprocess.Popen(
        command, cwd=folder, env=inherited | settings, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = started.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Broken(f"did not end within {limit_s:g} s: {' '.join(command[-8:])}") from None
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()
    return harness.Finished(started.returncode, output, errors)


@dataclass
class Recordings:
    """The traces of one call of the zoo, in ``folder``; equal runs are recorded once, whoever asks."""

    folder: Path
    view: View = "full"
    limit_s: float = LIMIT_S
    fork: bool = False
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def trace(self, run: Run, *, alone: bool = False) -> Path:
        """Return the trace of a run; raise Broken where its program fails.

        ``alone`` says that a run on one rank is a pair's second on one: in the view ``half`` it is the half
        of the pair's ranks whose activations are not recorded.
        """
        view = "bare" if self.view == "half" and alone else "full" if run.ranks == 1 else self.view
        view = self.view if self.view in ALIKE else view
        key = digest(run, view)
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._failed:
                raise Broken(self._failed[key])
            path = self.folder / f"{Path(run.program).stem}-{run.ranks}-{key}"
            if not path.exists():
                self._record(run, path, view, key)
            return path

    def _record(self, run: Run, path: Path, view: str, key: str) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            if self.fork and not run.record:
                wrong = _recorded_by_fork(run, part, view, self.limit_s)
            else:
                done = finish(command(run, part, view), folder=self.folder, limit_s=self.limit_s)
                last = "\n".join((done.output + done.errors).strip().splitlines()[-25:])
                wrong = f"ended with {done.exit_code}: {last}" if done.exit_code else ""
            if wrong:
                raise Broken(f"recording: {wrong}")
        except Broken as error:
            self._failed[key] = str(error)
            shutil.rmtree(part, ignore_errors=True)
            raise
        if path.exists():  # another call of the zoo was quicker
            shutil.rmtree(part)
        else:
            part.rename(path)

    def diff(self, arguments: Sequence[str]) -> str:
        """Run ``trace diff`` with these arguments and return its result as JSON; raise Broken on trouble."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="diff") as folder:
            told = Path(folder) / "result.json"
            whole = [*arguments, "-q", "--json", str(told)]
            if self.fork:
                from tests.zoo import forking

                if wrong := forking.diff(whole, Path(folder) / "log", self.limit_s):
                    raise Broken(f"diff: {wrong}")
            else:
                command = [str(harness.BIN / "trace"), "diff", *whole]
                done = finish(command, folder=self.folder, limit_s=self.limit_s)
                if done.exit_code not in (0, 1):
                    last = "\n".join(done.errors.strip().splitlines()[-25:])
                    raise Broken(f"diff ended with {done.exit_code}: {last}")
            return told.read_text()

    def claims(self, listed: Path, arguments: Sequence[str]) -> None:
        """Write what a diff claims at every boundary to ``listed``; raise Broken on trouble."""
        if self.fork:
            from tests.zoo import forking, powers

            wrong = forking.forked(
                [lambda: powers.main(str(listed), *arguments)],
                listed.with_suffix(".log"),
                self.limit_s,
                (0, 1),
            )
        else:
            module = [sys.executable, "-m", "tests.zoo.powers", str(listed), *arguments]
            wrong = finish(module, folder=harness.ROOT, limit_s=self.limit_s).errors
        if not listed.exists():
            raise Broken(f"diff: {wrong[-1000:]}")


def _recorded_by_fork(run: Run, trace: Path, view: str, limit_s: float) -> str:
    """Record in forked processes; return what went wrong, "" if nothing did."""
    from tests.zoo import forking  # imports torch

    without = ",".join(kind for kind in KINDS if kind not in LEFT_OUT)
    by_rank = [
        KINDS_OF_GRADIENTS
        if view == "gradients"
        else without
        if view == "bare" or (view == "half" and rank % 2)
        else ""
        for rank in range(run.ranks)
    ]
    level = "sketch" if view == "sketch" else "full"
    return forking.record(
        (PROGRAMS / run.program).resolve(), run.arguments, run.ranks, trace, by_rank, limit_s, level
    )


def command(run: Run, trace: Path, view: str) -> list[str]:
    """Return the command that records a run."""
    program, arguments = PROGRAMS / run.program, list(run.arguments)
    options = ["--force", *run.record]
    if view == "gradients":
        options += ["--kinds", KINDS_OF_GRADIENTS]
    if view == "sketch":
        options += ["--level", "sketch"]
    if view in ("half", "bare"):
        program, arguments = HALF, ["all" if view == "bare" else "odd", str(program.resolve()), *arguments]
    return harness.recording(trace, harness.on_ranks(run.ranks, program.resolve(), *arguments), *options)


def digest(run: Run, view: str) -> str:
    """Return a digest of a run, of its program's source and of the recorder's."""
    sha = hashlib.sha256(repr((run.program, run.ranks, run.arguments, run.record, view)).encode())
    sources = [
        *modules_of((PROGRAMS / run.program).resolve()),
        *sorted((harness.ROOT / "tracer").rglob("*.py")),
    ]
    for path in [*sources, HALF]:
        sha.update(path.read_bytes())
    for path in (harness.ROOT / option for option in run.record):
        if path.is_file():
            sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def modules_of(program: Path) -> list[Path]:
    """Return a program and what it imports from its own folder."""
    found: dict[Path, None] = {}
    waiting = [program]
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in found:
            found[path] = None
            waiting += [path.parent / f"{name}.py" for name in imported(path)]
    return sorted(found)


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
