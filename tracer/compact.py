"""Writes a finished trace again with its tensors compressed, in the place of the old one."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Literal

from tensortrace.tracer import layout
from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import RankManifest
from tensortrace.tracer.writer import RankWriter

NEW, OLD = ".compacting", ".before-compacting"
"""What the new trace is called until it is complete, and the old one while it is removed."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def compact(root: Path, *, compress: Literal["planes", "best"] = "planes") -> tuple[int, int]:
    """Replace a trace by one with the same boundaries, held as ``compress`` says; return both sizes in bytes.

    The old trace stays as it is until the new one is complete and has been read back, every digest checked;
    then they change places. Raises TraceError, and leaves the old one, where it is damaged, was not finished,
    or holds keys that this version doesn't know; BadRequest where there is none or something is in the way.
    """
    root = Path(os.path.realpath(root))
    trace = Trace.open(root)
    _refuse(root, trace)
    new, old = (root.with_name(root.name + suffix) for suffix in (NEW, OLD))
    for path in (new, old):
        if os.path.lexists(path):
            raise BadRequest(f"{path} is in the way", remedy="remove it, unless it is a trace you need")
    before = _size(root)
    try:
        _write(trace, new, compress)
        _verify(new)
        _change_places(new, root, old)
    except OSError as error:
        raise TraceError(f"{root}: not compacted: {error.strerror or error}") from error
    finally:
        for path in (new, old) if root.exists() else ():
            shutil.rmtree(path, ignore_errors=True)
    return before, _size(root)


def _refuse(root: Path, trace: Trace) -> None:
    part = next(root.rglob("*" + layout.PART), None)
    if part is not None:
        raise TraceError(f"{part}: still open, or left by a kill", expected="a finished trace")
    for rank in trace.ranks:
        if rank.manifest is None:
            raise TraceError(f"{rank.folder}: no {layout.RANK_MANIFEST}", expected="a finished trace")
        if lost := set(rank.manifest.ignorable) - set(RankManifest.__struct_fields__):
            raise TraceError(
                f"{rank.folder / layout.RANK_MANIFEST}: field ignorable: keys that would be lost",
                found=", ".join(sorted(lost))[:80],
                remedy="compact it with the version that wrote it",
            )


def _write(trace: Trace, new: Path, compress: Literal["planes", "best"]) -> None:
    """Write the new trace: what is not a rank's last attempt is copied as it is."""
    ranks = {rank.folder.name for rank in trace.ranks}
    shutil.copytree(
        trace.path, new, symlinks=True,
        ignore=lambda folder, names: ranks & set(names) if Path(folder) == trace.path else (),
    )  # fmt: skip
    for rank in trace.ranks:
        _write_rank(rank, new, compress)


def _write_rank(rank: RankTrace, new: Path, compress: Literal["planes", "best"]) -> None:
    assert rank.manifest is not None
    with RankWriter(new, rank.rank, attempt=rank.attempt, compress=compress, dedup=0) as writer:
        step: int | None = None
        for entry in rank.entries:
            if step not in (None, entry.step):
                writer.end_step()
            step = entry.step
            if entry.same_as is not None and entry.same_as >= entry.event:
                raise TraceError(f"{rank.folder}: event {entry.event} has the bytes of a later one")
            writer.rewrite(entry, rank.read_bytes(entry) if entry.blob is not None else None)
        writer.write_manifest(rank.manifest)


def _verify(new: Path) -> None:
    for rank in Trace.open(new).ranks:
        for entry in rank.entries:
            if entry.blob is not None:
                rank.read_bytes(entry)


def _change_places(new: Path, root: Path, old: Path) -> None:
    """Put the new trace where the old one is, in one act where the system has it; else in two renames."""
    if _exchange(new, root):
        os.rename(new, old)
        return
    os.rename(root, old)
    os.rename(new, root)


def _exchange(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
