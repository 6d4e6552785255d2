"""Packs a failing case: the part of one or two traces that gives the verdict, with a page about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from tensortrace.diff.expect.rules import as_file
from tensortrace.diff.result import Result
from tensortrace.replay.archive import CASE, README, SIDES, digests, rules_name, sizes, write_archive
from tensortrace.replay.case import (
    FORMAT_VERSION,
    MAX_RULES,
    Asked,
    Case,
    Packed,
    deviations,
    encode_case,
    expected_of,
)
from tensortrace.replay.cut import Part, cut, whole
from tensortrace.replay.minimise import SECONDS, TRIALS, minimise
from tensortrace.replay.packed import judge, replay_case
from tensortrace.replay.readme import readme
from tensortrace.replay.redact import (
    INPUTS_LEFT_OUT,
    INPUTS_REPLACED,
    REMOVED,
    OtherTokens,
    anonymous,
    other_inputs,
    without_comments,
)
from tensortrace.replay.result import Replay
from tensortrace.replay.sameness import first_of, names_of, same
from tensortrace.replay.writing import write_trace
from tensortrace.tracer import layout as files
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP

MAX_BYTES = 24 << 20
"""How large a case may be unless the user allows more: what may be attached to a report."""

_SHOWN = 4
_VERSIONS = ("tensortrace", "torch", "python", "numpy")


class PackOptions(Struct, frozen=True):
    """What is packed and how.

    ``asked``, ``expect`` and ``layouts`` (of a and b, None for recorded ones) are the options that the
    verdict is given under. ``redact`` and ``redact_inputs``: see ``tensortrace.replay.redact``. At most
    ``trials`` parts are tried in ``seconds`` to find a small one, if at all (``minimise``).
    """

    asked: Asked = Asked()
    expect: tuple[str, ...] = ()
    layouts: tuple[Path | None, ...] = (None, None)
    minimise: bool = True
    redact: bool = False
    redact_inputs: bool = False
    max_bytes: int = MAX_BYTES
    trials: int = TRIALS
    seconds: float = SECONDS


class PackedCase(NamedTuple):
    """A case that was packed and replayed: what it states, its size, and how many parts were tried."""

    case: Case
    size_bytes: int
    tried: int


def pack(
    traces: Sequence[Path], target: Path, *, options: PackOptions | None = None,
    told: Callable[[str], None] = lambda text: None, replace_target: bool = False,
) -> PackedCase:  # fmt: skip
    """Pack what one trace's replay, or the diff of two, says, and return what was packed.

    The archive is complete, and has been replayed, before ``target`` appears. Raises BadRequest where it
    would be larger than allowed or the verdict does not survive what was asked for; TraceError for damaged
    traces.
    """
    options = options or PackOptions()
    if len(options.expect) > MAX_RULES:
        raise BadRequest(f"--expect is given {len(options.expect)} times", expected=f"at most {MAX_RULES}")
    opened = [Trace.open(path) for path in traces]
    told("judging the traces")
    outcome = judge(opened, options.asked, layouts=options.layouts, expect=options.expect)
    part, tried = _part(opened, outcome, options, told)
    if options.redact_inputs:
        part = _without_inputs(opened, part, outcome, options)
    if part.spans:  # numbers that the headline tells may be others
        outcome = _judged(opened, part, options) or outcome
    with tempfile.TemporaryDirectory(prefix="tensortrace-pack-") as name:
        folder = Path(name)
        case = _lay_out(opened, part, outcome, folder / "case", options, target.name)
        made = folder / "case.zip"
        size = write_archive(made, folder / "case")
        if size > options.max_bytes:
            raise _too_large(made, size, options)
        told("replaying the archive")
        _confirm(case, made, options)
        _put(made, target, replace_target=replace_target)
    return PackedCase(case, size, tried)


def _part(
    traces: Sequence[Trace], outcome: Result | Replay, options: PackOptions, told: Callable[[str], None]
) -> tuple[Part, int]:
    """Return what is packed of the traces, and how many parts were tried to find it."""
    first = first_of(outcome)
    if first is None or not options.minimise:
        return whole(traces), 0
    tried = 0

    def holds(part: Part) -> bool:
        nonlocal tried
        tried += 1
        found = _judged(traces, part, options)
        return found is not None and same(outcome, found, cut=bool(part.spans))

    step = first.where.step
    part = minimise(
        traces, holds, step=INIT_STEP if step == "init" else step, names=names_of(first),
        worst=first.metrics.max_abs_at if first.metrics else (),
        offset=outcome.step_offset if isinstance(outcome, Result) else 0,
        told=told, trials=options.trials, seconds=options.seconds,
    )  # fmt: skip
    return part, tried


def _judged(traces: Sequence[Trace], part: Part, options: PackOptions) -> Result | Replay | None:
    """Return what a part of the traces gives; None where that cannot be judged, such as of no step at all."""
    try:
        return judge(cut(traces, part), options.asked, layouts=options.layouts, expect=options.expect)
    except Exception:  # whatever a diff makes of a part that no recording would leave: it says nothing
        return None


def _without_inputs(
    traces: Sequence[Trace], part: Part, outcome: Result | Replay, options: PackOptions
) -> Part:
    """Return a part without the values of inputs, but for integers, which are replaced when written."""
    found = part.bared(other_inputs(traces, part.kept))
    said = None if found == part else _judged(traces, found, options)
    if found != part and (said is None or deviations(expected_of(outcome), expected_of(said))):
        raise BadRequest(
            "--redact-inputs: the verdict needs the values of inputs, which are not integers",
            remedy="pack without it",
        )
    return found


def _lay_out(
    traces: Sequence[Trace],
    part: Part,
    outcome: Result | Replay,
    folder: Path,
    options: PackOptions,
    name: str,
) -> Case:
    """Write all members of the archive into a folder; return what it states."""
    folder.mkdir()
    kept = [anonymous(trace) if options.redact else trace for trace in cut(traces, part)]
    tokens = OtherTokens(traces) if options.redact_inputs else None
    for side, trace in zip(SIDES, kept, strict=False):
        write_trace(trace, folder / side, tokens=tokens)
    _add_layouts(traces, folder, options)
    for number, request in enumerate(options.expect):
        (folder / rules_name(number)).write_bytes(_told(as_file(request), options))
    case = Case(
        format=FORMAT_VERSION, of="diff" if len(traces) == 2 else "replay", expected=expected_of(outcome),
        asked=replace(options.asked, rules=len(options.expect)),
        packed_by=importlib.metadata.version("tensortrace"),
        traces=tuple(
            _packed(side, trace, found, part, options)
            for side, (trace, found) in enumerate(zip(traces, kept, strict=True))
        ),
        minimised=part != whole(traces), removed=_removed(traces, part, options), members=digests(folder),
        ignorable=("members",),
    )  # fmt: skip
    (folder / CASE).write_bytes(encode_case(case))
    (folder / README).write_text(readme(case, name=name), encoding="utf-8")
    return case


def _add_layouts(traces: Sequence[Trace], folder: Path, options: PackOptions) -> None:
    for side, trace, given in zip(SIDES, traces, options.layouts, strict=False):
        path = given or trace.path / files.LAYOUT
        if path.is_file():
            (folder / side / files.LAYOUT).write_bytes(_told(path.read_bytes(), options))


def _told(text: bytes, options: PackOptions) -> bytes:
    return without_comments(text.decode()).encode() if options.redact else text


def _removed(traces: Sequence[Trace], part: Part, options: PackOptions) -> tuple[str, ...]:
    found = [REMOVED] if options.redact else []
    if options.redact_inputs:
        left_out = other_inputs(traces, part.kept)
        found += [INPUTS_REPLACED, *([INPUTS_LEFT_OUT] if left_out else [])]
        found.append(
            "but values computed from inputs are there: who has the model may find out inputs from them"
        )
    return tuple(found)


def _packed(side: int, trace: Trace, kept: Trace, part: Part, options: PackOptions) -> Packed:
    manifests = [rank.manifest for rank in trace.ranks if rank.manifest]
    versions = manifests[0].environment.versions if manifests else {}
    entries = [entry for rank in kept.ranks for entry in rank.entries]
    return Packed(
        name=trace.path.resolve().name if not options.redact else "",
        world_size=max((manifest.world_size for manifest in manifests), default=len(trace.ranks)),
        versions={name: versions[name] for name in _VERSIONS if name in versions},
        recorded=sum(len(rank.entries) for rank in trace.ranks), boundaries=len(entries),
        ranks=tuple(rank.rank for rank in kept.ranks),
        steps=tuple(sorted({entry.step for entry in entries})),
        cut=sum(atom.side == side for atom in part.spans),
        without_values=sum(entry.blob is None and entry.same_as is None for entry in entries),
    )  # fmt: skip


def _too_large(archive: Path, size: int, options: PackOptions) -> BadRequest:
    largest = sorted(sizes(archive).items(), key=lambda member: -member[1])[:_SHOWN]
    told = ", ".join(f"{name} {taken:,}" for name, taken in largest)
    return BadRequest(
        f"the case takes {size:,} bytes", found=f"most of them in {told}",
        expected=f"at most {options.max_bytes:,}",
        remedy="allow more with --max-size" + ("" if options.minimise else ", or pack without --no-minimise"),
    )  # fmt: skip


def _confirm(case: Case, archive: Path, options: PackOptions) -> None:
    """Raise BadRequest where the archive does not give the verdict that it states."""
    found = replay_case(archive)
    if found:
        return
    asked = [
        name
        for name, given in (("--redact", options.redact), ("--redact-inputs", options.redact_inputs))
        if given
    ]
    raise BadRequest(
        f"the verdict does not survive {' and '.join(asked) or 'packing'}", found="; ".join(found.deviations),
        remedy=f"pack without {asked[-1]}" if asked else "please report this, with the traces if you can",
    )  # fmt: skip


def _put(made: Path, target: Path, *, replace_target: bool) -> None:
    """Move the archive to where it was asked for; it appears there whole."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(made, part)
        if not replace_target and os.path.lexists(target):
            raise BadRequest(f"{target} exists", remedy="use another name, or --force to replace it")
        os.replace(part, target)
    except OSError as error:
        raise BadRequest(f"{target} cannot be written", found=error.strerror or str(error)) from error
    finally:
        part.unlink(missing_ok=True)
