"""The whole validation: each cell's runs one after another, then feature against base and its noise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.result import Result
from tensortrace.replay.validate import arms
from tensortrace.replay.validate.arms import Arm, Asked, Interrupted
from tensortrace.replay.validate.cells import Cell, expand, look_through
from tensortrace.replay.validate.left_over import alone_in
from tensortrace.replay.validate.repository import Repository
from tensortrace.replay.validate.result import CellResult, Run, Validation, Verdict
from tensortrace.replay.validate.tags import tags_of
from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.settings import Settings

__all__ = ["SNAPSHOT", "Interrupted", "Request", "validate"]

SNAPSHOT = "the checkout as it stands"

_WORST: tuple[Verdict, ...] = ("trouble", "failed", "divergent", "incomplete", "equivalent")


class Request(NamedTuple):
    """What to validate.

    ``feature`` None means the checkout as it stands. ``folder`` keeps everything; runs that it holds
    already are not done again. ``reuse_base`` is the folder of another validation whose runs of the base
    are taken. ``base_runs`` is how often the base runs, at least twice. ``settings`` are those of the
    recordings, ``options`` those of the comparison.
    """

    command: Sequence[str]
    base: str
    feature: str | None
    folder: Path
    settings: Settings
    options: CompareOptions
    matrix: Sequence[str] = ()
    copied: Sequence[Path] = ()
    reuse_base: Path | None = None
    base_runs: int = 2


def validate(
    request: Request, *, here: Path, environ: Mapping[str, str],
    tell: Callable[[str], None] = lambda text: None,
    observe: Callable[[tuple[RankProgress, ...]], None] = lambda ranks: None,
) -> Validation:  # fmt: skip
    """Record base and feature from ``here``, a folder of a git checkout, and compare them.

    Raises a TraceError where nothing can be run: no checkout, no such commit, a dirty checkout that was not
    asked for, a command with placeholders or with files that a commit lacks, no base where one should be
    reused; Interrupted where a signal ended a run.
    """
    repository = Repository(here, environ)
    base, notes = repository.commit(request.base), []
    feature, said = _feature(repository, request.feature)
    notes += said
    folder = _folder(repository, request.folder)
    copied = tuple(_copied(repository, here, path) for path in request.copied)
    cells = expand(request.command, request.matrix)
    look_through(cells, repository, (base, feature), copied)
    if base == feature:
        notes.append("base and feature are one commit: this shows its noise alone")
    asked = Asked(repository, folder, request.settings, copied, environ, tell, observe)
    if request.reuse_base is not None:
        arms.check_reused(asked, cells, base, max(request.base_runs, 2), request.reuse_base)
    with alone_in(folder):
        results = tuple(_cell(asked, request, cell, base, feature) for cell in cells)
    verdict = min((result.verdict for result in results), key=_WORST.index)
    return Validation(
        verdict=verdict, headline=_headline(verdict, results), repository=str(repository.root),
        base=request.base, base_commit=base, feature=request.feature or SNAPSHOT, feature_commit=feature,
        folder=str(folder), cells=results, notes=tuple(notes),
    )  # fmt: skip


def _feature(repository: Repository, revision: str | None) -> tuple[str, list[str]]:
    changes = repository.changes()
    if revision is None:
        if not changes:
            return repository.commit("HEAD"), []
        count = f"{len(changes)} changed file{'s' * (len(changes) != 1)}"
        return repository.snapshot(), [f"the feature is a snapshot of the checkout, with {count}"]
    commit = repository.commit(revision)
    if changes and commit == repository.commit("HEAD"):
        raise BadRequest(
            f"the checkout differs from {revision} in {len(changes)} files", found=", ".join(changes[:3]),
            remedy="commit them, or pass --snapshot to validate the checkout as it stands",
        )  # fmt: skip
    return commit, ["changes in the checkout that are not committed are not part of this"] if changes else []


def _folder(repository: Repository, folder: Path) -> Path:
    whole = folder.absolute()
    if whole.exists() and not whole.is_dir():
        raise BadRequest(f"-o {folder}", found="a file", expected="a folder")
    root = repository.root.resolve()
    inside = whole.parent.resolve() / whole.name
    if inside.is_relative_to(root) and not repository.ignores(inside):
        raise BadRequest(
            f"-o {folder} lies in the checkout, which stays as it is",
            remedy="choose a folder outside of it, or one that git ignores",
        )
    try:
        inside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequest(f"-o {folder} cannot be made", found=error.strerror or str(error)) from error
    return inside


def _copied(repository: Repository, here: Path, path: Path) -> Path:
    whole = Path(os.path.normpath(here.resolve() / path))
    if not whole.exists():
        raise BadRequest(f"--copy {path}: no such file or folder")
    if not whole.is_relative_to(repository.root.resolve()):
        raise BadRequest(f"--copy {path}", found="a path outside of the checkout", expected="one inside")
    return whole


def _cell(asked: Asked, request: Request, cell: Cell, base: str, feature: str) -> CellResult:
    bases: list[Arm] = []
    for number in range(max(request.base_runs, 2)):
        bases.append(arms.record(asked, cell, f"base-{number + 1}", base, reuse=request.reuse_base))
        if bases[-1].ran.exit_code:
            return _failed(cell, bases, "trouble", "the base")
    done = [*bases, arms.record(asked, cell, "feature", feature)]
    if done[-1].ran.exit_code:
        return _failed(cell, done, "failed", "the feature")
    try:
        return _judged(asked, request, cell, done)
    except TraceError as error:
        return CellResult(cell.name, cell.command, "trouble", str(error), _runs(done))


def _judged(asked: Asked, request: Request, cell: Cell, done: list[Arm]) -> CellResult:
    first, *again, feature = done
    asked.tell(f"{cell.name}: comparing")
    tags, other = tags_of(first.trace), tags_of(feature.trace)
    if first.reused and (tags.versions, tags.host) != (other.versions, other.host):
        raise BadRequest(
            "the base that is reused ran elsewhere", found=f"{tags.host} {tags.versions}",
            expected=f"{other.host} {other.versions}",
            remedy="run it again: without --reuse-base, in a new folder",
        )  # fmt: skip
    repeats = [compare(first.trace, arm.trace, options=_plain(request.options)) for arm in again]
    unlike = next((result for result in repeats if not result and not _is_noise(result)), None)
    if unlike is not None:
        return CellResult(
            cell.name, cell.command, "trouble",
            f"two runs of the base are not alike ({unlike.headline}): seed what it draws, or pass "
            "--consistent-init and --consistent-dropout", _runs(done), tags,
        )  # fmt: skip
    result = compare(first.trace, feature.trace, options=_with_floor(request.options, again))
    path = asked.folder / cell.name / f"{feature.name}.diff.json"
    path.write_bytes(result.to_json() + b"\n")
    return CellResult(
        cell.name, cell.command, result.verdict, result.headline, _runs(done), tags,
        noise=_noise(repeats),
        compared=result.coverage.compared, bitwise_equal=result.coverage.bitwise_equal,
        cause=result.causes[0].code if result.causes else None, diff=str(path), notes=result.notes,
    )  # fmt: skip


def _is_noise(result: Result) -> bool:
    """Tell whether two runs of one code differ by what a floor may measure: not by what they are given."""
    first = result.first_divergent
    return first is not None and first.where.step != "init" and first.where.kind != "input"


def _noise(repeats: Sequence[Result]) -> float:
    """Return by what share of what correct programs may differ runs of the base do, where that is most."""
    ratios = [judged.judgement.ratio for repeat in repeats for judged in repeat.boundaries]
    equal = all(repeat.coverage.bitwise_equal == repeat.coverage.compared for repeat in repeats)
    return 0.0 if equal else max(ratios, default=0.0)


def _plain(options: CompareOptions) -> CompareOptions:
    return msgspec.structs.replace(options, expect=(), floor=())


def _with_floor(options: CompareOptions, again: Sequence[Arm]) -> CompareOptions:
    return msgspec.structs.replace(options, floor=tuple(arm.trace for arm in again))


def _failed(cell: Cell, done: list[Arm], verdict: Verdict, which: str) -> CellResult:
    last = done[-1]
    said = arms.tail(last)
    headline = f"{which} ended with exit code {last.ran.exit_code}" + (f": {said}" if said else "")
    return CellResult(cell.name, cell.command, verdict, headline, _runs(done))


def _runs(done: Sequence[Arm]) -> tuple[Run, ...]:
    return tuple(
        Run(
            arm.name.rpartition("-")[0], arm.ran.commit, str(arm.trace), str(arm.log), arm.ran.exit_code,
            arm.ran.seconds, arm.reused,
        )
        for arm in done
    )  # fmt: skip


def _headline(verdict: Verdict, results: Sequence[CellResult]) -> str:
    count = len(results)
    alike = sum(result.verdict == "equivalent" for result in results)
    if verdict == "equivalent":
        return "equivalent: the feature computes what the base does" + (
            f", in all {count} cells" if count > 1 else ""
        )
    first = next(result for result in results if result.verdict == verdict)
    where = f" in {count - alike} of {count} cells, first {first.name}" if count > 1 else ""
    return f"{verdict}{where}: {first.headline.removeprefix(verdict).lstrip(': ')}"
