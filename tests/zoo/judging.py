"""Diffs the pairs of the zoo, and says of each whether the tool said what is right."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from msgspec import MsgspecError

from tensortrace.diff.result import Result, Where
from tests import harness
from tests.zoo.case import PROGRAMS, At, Bug, Draw, Legal, Pair
from tests.zoo.recording import Broken, Recordings


@dataclass(frozen=True)
class Row:
    """What came of one case. ``said`` is one or two words, ``right`` where they are as wished."""

    kind: str
    name: str
    draw: int
    right: bool
    said: str
    expected: str = ""
    found: str = ""
    code: str = ""
    residual: str = ""
    compared: int = 0
    equal: int = 0
    median: float | None = None
    worst: float | None = None
    detail: str = ""
    traces: tuple[str, ...] = ()


def judge_bug(bug: Bug, draw: Draw, recordings: Recordings) -> Row:
    """Return whether a planted mistake's first boundary and cause are named as derived by hand."""
    about = {"kind": "bug", "name": bug.name, "draw": draw.seed}
    try:
        planted = bug.make(draw)
        about["expected"] = f"{_at(planted.first)} {planted.code}"
        traces, result = diffed(planted.pair, recordings)
    except Broken as error:
        return Row(**about, right=False, said="broken", detail=str(error))  # type: ignore[arg-type]
    except Exception as error:  # a case that cannot be made is a row too
        return Row(**about, right=False, said="broken", detail=repr(error))  # type: ignore[arg-type]
    said = said_of(result, planted.first, planted.code)
    cause = result.causes[0] if result.causes else None
    return Row(
        **about,  # type: ignore[arg-type]
        right=said == "right",
        said=said,
        found=named(result.first_divergent.where) if result.first_divergent else "",
        code=cause.code if cause else "unexplained" if result.first_divergent else "",
        residual=f"{cause.residual_after:.2g}/{cause.floor:.2g}" if cause else "",
        compared=result.coverage.compared,
        detail="" if said == "right" else summary(result),
        traces=traces,
    )


def said_of(result: Result, first: At, code: str) -> str:
    """Return what a diff of a planted mistake amounts to."""
    if result.verdict != "divergent" or result.first_divergent is None:
        return "missed" if result.verdict == "equivalent" else result.verdict
    if not matches(result.first_divergent.where, first):
        return "other place"
    named = result.causes[0].code if result.causes else ""
    if code == "unexplained":  # what would explain it is in neither trace: any cause would be wrong
        return "other cause" if named else "right"
    return "right" if named == code else "other cause" if named else "no cause"


def matches(where: Where, first: At) -> bool:
    """Tell whether a boundary is the one that was derived."""
    return (
        where.step == first.step
        and where.kind == first.kind
        and fnmatchcase(where.name, first.name)
        and fnmatchcase(where.slot, first.slot)
    )


def judge_legal(legal: Legal, draw: Draw, recordings: Recordings) -> Row:
    """Return whether a legal pair is called equivalent."""
    about = {"kind": "legal", "name": legal.name, "draw": draw.seed, "expected": "equivalent"}
    try:
        traces, result = diffed(legal.make(draw), recordings)
    except Broken as error:
        return Row(**about, right=False, said="broken", detail=str(error))  # type: ignore[arg-type]
    except Exception as error:
        return Row(**about, right=False, said="broken", detail=repr(error))  # type: ignore[arg-type]
    right = result.verdict == "equivalent"
    power = result.power
    return Row(
        **about,  # type: ignore[arg-type]
        right=right,
        said=result.verdict if right or result.verdict == "incomplete" else "ALARM",
        found=named(result.first_divergent.where) if result.first_divergent else "",
        code=result.causes[0].code if result.causes else "",
        compared=result.coverage.compared,
        equal=result.coverage.bitwise_equal,
        median=power.typical_incoherent if power else None,
        worst=power.incoherent if power else None,
        detail="" if right else summary(result),
        traces=traces,
    )


def diffed(pair: Pair, recordings: Recordings) -> tuple[tuple[str, str], Result]:
    """Record both runs of a pair, unless they are, and return their traces and the diff's result."""
    a = recordings.trace(pair.a)
    b = recordings.trace(pair.b, alone=pair.a.ranks == pair.b.ranks == 1)
    try:
        return (str(a), str(b)), harness.read_result(recordings.diff([str(a), str(b), *options_of(pair)]))
    except MsgspecError as error:
        raise Broken(f"the diff's result cannot be read: {error}") from error


def options_of(pair: Pair) -> list[str]:
    """Return the options of ``trace diff`` that a pair needs."""
    found = list(pair.options)
    for option, run in (("--layout-a", pair.a), ("--layout", pair.b)):
        if run.layout:
            found += [option, str(PROGRAMS / "layouts" / run.layout)]
    return found


def summary(result: Result) -> str:
    """Return what a person wants to know of a result that is not as wished."""
    first = result.first_divergent
    judged = f"\njudged: {first.judgement.reason}" if first and first.judgement else ""
    notes = "".join(f"\nnote: {note}" for note in result.notes)
    return harness.Diffed(1, result).summary() + judged + notes


def _at(at: At) -> str:
    return f"{at.step} {at.kind} {at.name} {at.slot}"


def matches_where(where: Where, other: Where) -> bool:
    """Tell whether two boundaries are the same, whatever microbatch and call."""
    return all(getattr(where, part) == getattr(other, part) for part in ("step", "kind", "name", "slot"))


def named(where: Where) -> str:
    return f"{where.step} {where.kind} {where.name} {where.slot}"
