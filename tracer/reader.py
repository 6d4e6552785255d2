"""Open a trace: which ranks it has, what is missing, and each rank's entries and tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tensortrace.tracer import layout
from tensortrace.tracer.errors import BadRequest, DamagedTrace, TraceError
from tensortrace.tracer.manifest import read_manifest
from tensortrace.tracer.nearest import meant, sibling
from tensortrace.tracer.reader_check import check_copies, check_rank
from tensortrace.tracer.reader_copies import Copies
from tensortrace.tracer.reader_index import OnDamage
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Manifest

LIMIT_BYTES = 16 << 30
"""The largest tensor that is read unless the caller allows more."""

_SHOWN = 8


class Trace:
    """An open trace; ``open`` makes one. Holds no file open; a writer may still be at work.

    ``ranks`` are in order, each at its last attempt. ``problems`` say everything that is missing, the
    ranks' own problems included. ``manifest`` is None where ``trace.json`` is missing.
    """

    def __init__(
        self, path: Path, manifest: Manifest | None, ranks: tuple[RankTrace, ...], problems: tuple[str, ...]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.ranks = ranks
        self.problems = problems

    @classmethod
    def open(
        cls, path: Path | str, *, on_damage: OnDamage = "refuse", limit_bytes: int = LIMIT_BYTES
    ) -> Self:
        """Read the manifests and indexes of a trace; rank folders alone are enough.

        Raises DamagedTrace for a damaged or foreign file, naming it and the offset; under
        ``on_damage="salvage"`` what can be read is read and the damage is listed in ``problems``. Raises
        UnsupportedFormat for a newer format, BadRequest where there is no such folder.
        """
        root = Path(path)
        folders = _rank_folders(root)
        problems: list[str] = []
        manifest = _read_manifest(root, problems, on_damage)
        if manifest is None and not folders:
            raise DamagedTrace(f"{root}: not a trace: it has neither {layout.MANIFEST} nor a rank folder")
        ranks = tuple(
            RankTrace.open(folder, rank, attempt, on_damage=on_damage, limit_bytes=limit_bytes)
            for rank, (attempt, folder) in sorted(folders.items())
        )
        share_copies(ranks)
        problems += _missing(root, manifest, ranks)
        problems += [problem for rank in ranks for problem in rank.problems]
        return cls(root, manifest, ranks, tuple(problems))

    def close(self) -> None:
        """Let go of the entries; reading afterwards is not possible through ``ranks``."""
        self.ranks = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check(path: Path | str, *, limit_bytes: int = LIMIT_BYTES) -> Iterator[str]:
    """Yield everything that is wrong with a trace, or nothing: every line, digest and segment is read.

    Raises TraceError only where there is no trace to check.
    """
    trace = Trace.open(path, on_damage="salvage", limit_bytes=limit_bytes)
    yield from trace.problems
    for rank in trace.ranks:
        yield from check_rank(rank)
        yield from check_copies(rank)


def _rank_folders(root: Path) -> dict[int, tuple[int, Path]]:
    """Return each rank's last attempt and its folder."""
    try:
        names = os.listdir(root)
    except FileNotFoundError as error:
        raise BadRequest(f"{root}: no such folder", remedy=meant(sibling(root))) from error
    except NotADirectoryError as error:
        raise DamagedTrace(f"{root}: not a trace: a trace is a folder") from error
    except OSError as error:
        raise TraceError(f"{root}: cannot be opened: {error.strerror}") from error
    found: dict[int, tuple[int, Path]] = {}
    for name in names:
        parsed = layout.parse_rank_folder(name)
        if parsed is None or layout.rank_folder(root, *parsed).name != name or not (root / name).is_dir():
            continue
        rank, attempt = parsed
        if rank not in found or attempt > found[rank][0]:
            found[rank] = (attempt, root / name)
    return found


def _read_manifest(root: Path, problems: list[str], on_damage: OnDamage) -> Manifest | None:
    try:
        manifest = read_manifest(root / layout.MANIFEST)
    except FileNotFoundError:
        problems.append(f"{root}: no {layout.MANIFEST}; the ranks stand alone")
        return None
    except DamagedTrace as error:
        if on_damage == "refuse":
            raise
        problems.append(str(error))
        return None
    if manifest.ended_at is None:
        problems.append(f"{root / layout.MANIFEST}: the run had not ended, or its launcher was killed")
    return manifest


def share_copies(ranks: tuple[RankTrace, ...]) -> None:
    """Let ranks read what they left to others; of hostile levels nothing is left."""
    promises = [rank.manifest.promise for rank in ranks if rank.manifest]
    promise = next((promise for promise in promises if promise.dedup_replicas), None)
    if promise is not None:
        copies = Copies(ranks, promise)
        for rank in ranks:
            rank.copies = copies


def _missing(root: Path, manifest: Manifest | None, ranks: tuple[RankTrace, ...]) -> list[str]:
    """Return which ranks and attempts are not there, as far as the manifests tell."""
    problems = []
    world = max((rank.manifest.world_size for rank in ranks if rank.manifest), default=0)
    have = {rank.rank for rank in ranks}
    absent = world - sum(rank < world for rank in have)
    if absent:
        first = [str(rank) for rank in range(min(world, len(have) + _SHOWN)) if rank not in have][:_SHOWN]
        more = ", …" if absent > len(first) else ""
        problems.append(f"{root}: {absent} of {world} ranks left no folder: {', '.join(first)}{more}")
    last = max((rank.attempt for rank in ranks), default=0)
    for rank in ranks:
        if rank.attempt < last:
            problems.append(f"{rank.folder}: attempt {rank.attempt}, though others are at attempt {last}")
    problems += [
        f"{root}: {layout.MANIFEST} lists {name[:40]!r}, which is missing"
        for name in (manifest.ranks if manifest else ())
        if layout.parse_rank_folder(name) is None or not (root / name).is_dir()
    ]
    return problems
