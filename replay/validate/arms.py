"""One recorded run of a commit: done once, found again by what it was asked to be."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from tensortrace.replay.validate import left_over
from tensortrace.replay.validate.cells import Cell
from tensortrace.replay.validate.imports import environment
from tensortrace.replay.validate.repository import Repository
from tensortrace.tracer import launch
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.settings import Settings

TREE = "tree"
"""The folder in which each run's commit is checked out in turn: all runs see the same path."""

_TAIL_BYTES = 4096
_MAX_NOTE_BYTES = 1 << 20


class Ran(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is noted of a run that ended: ``key`` tells what it was asked to be."""

    key: str
    commit: str
    command: tuple[str, ...]
    exit_code: int
    seconds: float


class Arm(NamedTuple):
    """One run: its trace, the note of how it ended, whether it was found rather than run."""

    name: str
    trace: Path
    ran: Ran
    reused: bool

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.trace.with_name(self.trace.name + ".log")


class Asked(NamedTuple):
    """What all runs of a validation have in common.

    ``settings`` are those of the recording but for its place, ``copied`` the paths of the checkout that
    each run is given a copy of, ``tell`` gets what is being done and the state of the ranks meanwhile.
    """

    repository: Repository
    folder: Path
    settings: Settings
    copied: tuple[Path, ...]
    environ: Mapping[str, str]
    tell: Callable[[str], None]
    observe: Callable[[tuple[RankProgress, ...]], None]


class Interrupted(Exception):
    """The user asked us to stop while a command ran; ``signal`` is how."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def record(asked: Asked, cell: Cell, role: str, commit: str, *, reuse: Path | None = None) -> Arm:
    """Run a cell's command in a fresh checkout of a commit, recorded; or return the run that was done before.

    ``reuse`` is the folder of another validation in which it may be found. Raises BadRequest where
    something else was run under this name, or the run cannot start, Interrupted where a signal ended it.
    """
    name = f"{role}-{commit[:12]}"
    key = _key(asked, cell, commit)
    for folder in (reuse, asked.folder):
        if folder is not None and (found := _find(folder / cell.name, name, key)) is not None:
            return found
    trace = asked.folder / cell.name / name
    asked.tell(f"{cell.name}: {role}: {commit[:12]}")
    trace.parent.mkdir(parents=True, exist_ok=True)
    if left_over.end(trace):
        asked.tell(f"{cell.name}: {role}: what was left of it is ended, and it is run again")
    launch.clear(trace)  # of a run that was interrupted
    began = time.monotonic()
    with asked.repository.checked_out(commit, asked.folder / TREE) as tree:
        exit_code = _run(asked, cell, trace, tree)
    ran = Ran(key, commit, cell.command, exit_code, time.monotonic() - began)
    _note(trace).write_bytes(msgspec.json.format(msgspec.json.encode(ran)) + b"\n")
    return Arm(name, trace, ran, reused=False)


def check_reused(asked: Asked, cells: Sequence[Cell], commit: str, runs: int, folder: Path) -> None:
    """Raise BadRequest where another validation's folder holds no run of a base that could be taken."""
    names = [f"base-{number + 1}-{commit[:12]}" for number in range(runs)]
    found = [_find(folder / cell.name, name, _key(asked, cell, commit)) for cell in cells for name in names]
    if not any(found):
        others = sorted({path.stem.rpartition("-")[2] for path in folder.glob("*/base-1-*.json")})
        raise BadRequest(
            f"--reuse-base {folder} holds no finished run of {commit[:12]} with this command",
            found=f"runs of {', '.join(others[:3])}" if others else "no run of a base",
            expected="the folder (-o) of a validation with the same base",
        )


def _run(asked: Asked, cell: Cell, trace: Path, tree: Path) -> int:
    here = tree / asked.repository.prefix
    if not here.is_dir():
        raise BadRequest(
            f"the commit has no folder {asked.repository.prefix}", remedy="start from one it has"
        )
    _copy(asked, tree)
    environ = environment(cell.command, asked.environ, asked.repository.root, tree) | {"PWD": str(here)}
    settings = msgspec.structs.replace(asked.settings, root=str(trace))
    with open(trace.with_name(trace.name + ".log"), "wb") as log:
        outcome = launch.run(
            cell.command, settings, environ=environ, observe=asked.observe, folder=here, output=log
        )
    if outcome.stopped_by is not None:
        raise Interrupted(outcome.stopped_by)  # no note is written: it is run again
    return launch.exit_code(outcome, settings)


def _copy(asked: Asked, tree: Path) -> None:
    for source in asked.copied:
        target = tree / source.relative_to(asked.repository.root.resolve())
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)


def tail(arm: Arm, lines: int = 3) -> str:
    """Return the last lines that a run printed."""
    try:
        with open(arm.log, "rb") as log:
            log.seek(max(os.fstat(log.fileno()).st_size - _TAIL_BYTES, 0))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())


def _find(folder: Path, name: str, key: str) -> Arm | None:
    """Return the finished run of this name; None where there is none, or it did not end or ended badly."""
    trace = folder / name
    try:
        with open(_note(trace), "rb") as note:
            ran = msgspec.json.decode(note.read(_MAX_NOTE_BYTES), type=Ran)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadRequest(f"{_note(trace)} cannot be read", found=str(error), remedy="remove it") from error
    if ran.key != key:
        raise BadRequest(
            f"{trace} is a run of another command, other options or other copied files",
            found=" ".join(ran.command), remedy="choose another folder with -o",
        )  # fmt: skip
    return None if ran.exit_code else Arm(name, trace, ran, reused=True)


def _note(trace: Path) -> Path:
    return trace.with_name(trace.name + ".json")


def _key(asked: Asked, cell: Cell, commit: str) -> str:
    """Return a digest of all that a run was asked to be: equal keys mean the same run."""
    settings = msgspec.structs.replace(asked.settings, root="")
    root = asked.repository.root.resolve()
    files = {
        path.relative_to(root).as_posix(): _digest(path)
        for source in asked.copied
        for path in sorted(source.rglob("*") if source.is_dir() else [source])
        if path.is_file()
    }
    parts = (commit, cell.command, str(asked.repository.prefix), settings, files)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()
