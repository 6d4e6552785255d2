"""Gives one process one rank folder: no two processes ever write the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from tensortrace.tracer import layout
from tensortrace.tracer.alive import is_alive
from tensortrace.tracer.errors import BadRequest

T = TypeVar("T")


class _Owner(msgspec.Struct):
    """The part of ``rank.json`` that says whose the folder is; other keys don't matter here."""

    pid: int = 0
    host: str = ""
    ended: str | None = None


def claim(
    root: Path, rank: int, *, attempt: int, host: str, open_folder: Callable[[int], T]
) -> tuple[T, int]:
    """Open the folder of this rank, and return what was opened with its attempt number.

    ``open_folder`` gets an attempt number and raises FileExistsError where that folder exists. Attempts
    count on from ``attempt`` (elastic restarts) past folders whose process has ended, so that a second
    program of the same command (train, then resume) gets a folder of its own. Raises BadRequest while
    another process holds the rank: a helper that inherited the rank's environment, or ranks that cannot
    tell each other apart. Raises OSError where nothing can be written.
    """
    while True:
        try:
            return open_folder(attempt), attempt
        except FileExistsError:
            _refuse_if_held(layout.rank_folder(root, rank, attempt), rank, host)
            attempt += 1


def _refuse_if_held(folder: Path, rank: int, host: str) -> None:
    try:
        owner = msgspec.json.decode((folder / layout.RANK_MANIFEST).read_bytes(), type=_Owner)
    except (OSError, msgspec.DecodeError):
        owner = _Owner()
    if owner.ended is None and (owner.host != host or is_alive(owner.pid)):
        raise BadRequest(
            f"rank {rank} is already recorded by process {owner.pid or 'unknown'}",
            remedy="processes without torch.distributed or RANK cannot be told apart",
        )
