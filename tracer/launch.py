"""Runs a command so that its trainer ranks record, and keeps the trace's manifest."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec

from tensortrace.tracer import job_step, layout
from tensortrace.tracer.alive import is_alive
from tensortrace.tracer.environment import launch_environment
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.launch_signal import signal_ranks
from tensortrace.tracer.manifest import finish_manifest, write_manifest_new
from tensortrace.tracer.masking import mask_arguments
from tensortrace.tracer.progress import RankProgress, look
from tensortrace.tracer.settings import VARIABLE, Settings, encode
from tensortrace.tracer.types import Manifest

INJECT = Path(__file__).parent / "inject"
"""The folder that goes first on PYTHONPATH; it holds nothing but sitecustomize.py."""

LOOK_EVERY_S = 1.0
TROUBLE = 2
NOT_FOUND = 127
NOT_EXECUTABLE = 126

_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT", "SIGWINCH", "SIGINT")
)
_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_FROM_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH})


class Outcome(msgspec.Struct, frozen=True):
    """How a recorded command ended: its exit code (128+n for signal n), and what its ranks left.

    ``stopped_by`` is the signal that asked this program to stop meanwhile, None where none did. ``joined``
    tells that another task of the same step began the trace, and speaks for it.
    """

    exit_code: int
    ranks: tuple[RankProgress, ...]
    stopped_by: int | None = None
    joined: bool = False


class CannotStart(BadRequest):
    """The command does not exist or may not be executed; ``exit_code`` is what a shell would return."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def run(
    command: Sequence[str],
    settings: Settings,
    *,
    environ: Mapping[str, str],
    observe: Callable[[tuple[RankProgress, ...]], None],
    described: bytes | None = None,
    folder: Path | None = None,
    output: BinaryIO | None = None,
) -> Outcome:
    """Execute the command, recorded, and return how it ended.

    It runs in ``folder``, else in the present one. Standard streams are inherited, but for what it prints
    where ``output`` takes that, and signals are forwarded. ``observe`` gets the state of all ranks about
    once a second. ``described`` is the text of the run's layout file, which is kept in the trace and read
    there by the ranks. Raises BadRequest where the output exists, CannotStart where the command cannot run.

    Of the tasks of a Slurm step that record into one folder the first begins the trace, and ends it with its
    own command's code; the others join it.
    """
    root, shared = Path(settings.root), job_step.shared_run(environ)
    check(command, None if settings.dry_run else root, folder, shared=shared)
    manifest = None
    if not settings.dry_run:
        manifest = _begin_or_join(root, command, settings, environ, described, folder, shared)
    joined = manifest is None and not settings.dry_run
    if manifest is not None and described is not None:
        settings = msgspec.structs.replace(settings, layout=str(root / layout.LAYOUT))
    try:
        instead: dict[int, Callable[[], None]] = {}
        if "SIGUSR1" in settings.promise.triggers:
            instead[signal.SIGUSR1] = lambda: signal_ranks(root)
        exit_code, stopped_by = _execute(
            command,
            child_environ(settings, environ),
            (lambda: None) if joined else lambda: observe(look(root)),
            instead,
            folder,
            output,
        )
    except OSError as error:
        if manifest is not None:
            _abandon(root)
        raise _cannot_start(command, error) from error
    ranks = look(root)
    if manifest is not None:
        finish_trace(root, manifest, exit_code, ranks)
    if shared is not None:  # other tasks may be at work still
        ranks = tuple(rank for rank in ranks if rank.ended is not None or _was_killed(rank))
    return Outcome(exit_code, ranks, stopped_by, joined)


def check(
    command: Sequence[str], root: Path | None = None, folder: Path | None = None, *, shared: str | None = None
) -> None:
    """Raise what ``run`` would before anything starts: CannotStart, or BadRequest where ``root`` exists."""
    _check_command(command, folder or Path())
    if root is None or not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return
    if shared is None or not job_step.began(root / layout.MANIFEST, shared):
        raise BadRequest(f"output {root} exists", remedy="choose another or pass --force")


def _was_killed(rank: RankProgress) -> bool:
    return rank.host == socket.gethostname() and not is_alive(rank.pid)


def _begin_or_join(
    root: Path, command: Sequence[str], settings: Settings, environ: Mapping[str, str],
    described: bytes | None, folder: Path | None, shared: str | None,
) -> Manifest | None:  # fmt: skip
    """Begin the trace and return its manifest; None where another task of the step has begun it."""
    try:
        return begin_trace(root, command, settings, environ, described, folder, run_id=shared)
    except BadRequest:
        if shared is None or not job_step.began(root / layout.MANIFEST, shared):
            raise
        return None


def exit_code(outcome: Outcome, settings: Settings) -> int:
    """Return the exit code of ``trace record``: the command's own, or 2 where that would hide trouble.

    Trouble is a command that succeeded and trained nothing that could be recorded, and under ``--strict``
    also a rank whose recording failed.
    """
    failed = any((rank.ended or "").startswith("failed") for rank in outcome.ranks)
    trouble = (settings.strict and failed) or not (outcome.ranks or settings.dry_run)
    return outcome.exit_code or (TROUBLE if trouble else 0)


def child_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that makes every Python process of a command record."""
    theirs = environ.get("PYTHONPATH")
    path = os.pathsep.join([str(INJECT), theirs] if theirs else [str(INJECT)])
    return dict(environ) | {"PYTHONPATH": path, VARIABLE: encode(settings)}


def clear(root: Path) -> None:
    """Remove the trace at ``root``, for ``--force``; nothing but the files of a trace.

    Raises BadRequest where ``root`` holds anything else.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise BadRequest(f"output {root}", found="a file", expected="a trace or nothing")
    for entry in (entries := list(root.iterdir())):
        if entry.name not in (layout.MANIFEST, layout.MANIFEST + layout.PART, layout.LAYOUT) and not (
            entry.is_dir() and layout.parse_rank_folder(entry.name)
        ):
            raise BadRequest(f"output {root}", found=entry.name, expected="only a trace to replace")
    for entry in entries:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _check_command(command: Sequence[str], folder: Path) -> None:
    program = os.path.join(folder, command[0]) if os.sep in command[0] else command[0]
    if shutil.which(program) is None:
        found = os.sep in command[0] and Path(program).exists()
        raise _cannot_start(command, PermissionError() if found else FileNotFoundError())


def _cannot_start(command: Sequence[str], error: OSError) -> CannotStart:
    if isinstance(error, FileNotFoundError):
        return CannotStart(f"{command[0]}: command not found", NOT_FOUND)
    return CannotStart(f"{command[0]}: cannot be executed ({error.strerror or error})", NOT_EXECUTABLE)


def begin_trace(
    root: Path,
    command: Sequence[str],
    settings: Settings,
    environ: Mapping[str, str],
    described: bytes | None = None,
    folder: Path | None = None,
    *,
    run_id: str | None = None,
) -> Manifest:
    """Write ``trace.json`` of a run that is about to start, and return it; beside it the run's layout file.

    ``folder`` is where it will run, else the present one. Without ``run_id`` it gets a name of its own.

    Raises BadRequest where there is one already or where it cannot be written.
    """
    manifest = Manifest(
        format=layout.version_of(settings.promise),
        run_id=run_id or uuid.uuid4().hex,
        command=mask_arguments(command),
        started_at=time.time(),
        promise=settings.promise,
        environment=launch_environment(
            command, environ, folder=folder or Path.cwd(), start=settings.start.options()
        ),
    )
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_manifest_new(root / layout.MANIFEST, manifest)
        if described is not None:
            (root / layout.LAYOUT).write_bytes(described)
    except FileExistsError as error:
        raise BadRequest(f"output {root} exists", remedy="choose another or pass --force") from error
    except OSError as error:
        raise BadRequest(f"output {root} cannot be written", found=str(error.strerror)) from error
    return manifest


def _abandon(root: Path) -> None:
    (root / layout.MANIFEST).unlink()
    (root / layout.LAYOUT).unlink(missing_ok=True)
    with suppress(OSError):  # another task of the step may have begun in it
        root.rmdir()


def finish_trace(root: Path, manifest: Manifest, exit_code: int, ranks: tuple[RankProgress, ...]) -> None:
    """Complete trace.json; a full disk must not change how the command ends."""
    finished = msgspec.structs.replace(
        manifest, ranks=tuple(rank.folder for rank in ranks), exit_code=exit_code, ended_at=time.time()
    )
    try:
        finish_manifest(root / layout.MANIFEST, finished)
    except OSError:
        return


def _execute(
    command: Sequence[str],
    environ: Mapping[str, str],
    look_in: Callable[[], None],
    instead: Mapping[int, Callable[[], None]],
    folder: Path | None,
    output: BinaryIO | None,
) -> tuple[int, int | None]:
    """Run a command; return its exit code, and the signal that asked us to stop, if any.

    ``instead`` of forwarding some signals, call a function.
    """
    child: subprocess.Popen[bytes] | None = None
    waiting: list[int] = []
    stopped_by: int | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        if number in _STOPS:
            stopped_by = number
        if number in _FROM_TERMINAL and _in_foreground():
            return  # the terminal has sent it to the whole process group already
        if number in instead:
            instead[number]()
        elif child is None:
            waiting.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    with _handling(forward):
        child = subprocess.Popen(  # noqa: S603  # it is what we are for
            list(command), env=dict(environ), cwd=folder, stdout=output, stderr=output and subprocess.STDOUT
        )
        for number in waiting:
            child.send_signal(number)
        while True:
            try:
                return _shell_code(child.wait(LOOK_EVERY_S)), stopped_by
            except subprocess.TimeoutExpired:
                look_in()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that a user sends to a program; leave alone those that were ignored."""
    before = {
        number: signal.signal(number, handler)
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode
