"""Runs programs recorded and not, for the tests of how recording behaves as a guest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tensortrace.tracer.manifest import read_rank_manifest
from tensortrace.tracer.types import RankManifest

PROGRAMS = Path(__file__).parent / "programs"
PYTHON = sys.executable
TRAIN = (PYTHON, str(PROGRAMS / "train.py"))
LIMIT_S = 180


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def digests(self) -> list[str]:
        """What the ranks of ``train.py`` say that they computed, by rank."""
        return sorted(line for line in self.out.splitlines() if line.startswith("digest "))

    @property
    def warnings(self) -> list[str]:
        """What the recorder said on stderr from inside the program."""
        return [line for line in self.err.splitlines() if line.startswith("tensortrace: ")]


def torchrun(*arguments: str, ranks: int = 2) -> tuple[str, ...]:
    """Return a command that runs a script on several ranks."""
    launcher = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return (*launcher, *arguments)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment with one thread a process."""
    return os.environ | {"OMP_NUM_THREADS": "1"} | dict(extra or {})


def run(*command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Run a command to its end."""
    ended = subprocess.run(
        command, env=environment(env), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def recorded(
    root: Path, *command: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ran:  # fmt: skip
    """Run a command under ``trace record``."""
    return run(*record_command(root, *command, options=options), env=env, cwd=cwd)


def record_command(root: Path, *command: str, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command line that records a command into ``root``."""
    return (
        str(Path(PYTHON).with_name("trace")),
        "record",
        "-o",
        str(root),
        "--min-free",
        "0",
        *options,
        "--",
        *command,
    )


@contextmanager
def started(root: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command under ``trace record``, in a session of its own that ends with the context."""
    child = subprocess.Popen(
        record_command(root, *command),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def wait_for_line(child: subprocess.Popen[str], *, count: int = 1) -> None:
    """Return once the child has written so many lines to its standard output."""
    assert child.stdout is not None
    for _ in range(count):
        assert child.stdout.readline()


@cache
def plain(*command: str) -> Ran:
    """Run a command as it is, once for all tests."""
    return run(*command)


def ranks_of(root: Path) -> dict[str, RankManifest]:
    """Return the manifests of all rank folders by name."""
    return {path.parent.name: read_rank_manifest(path) for path in sorted(root.glob("rank*/rank.json"))}
