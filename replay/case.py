"""What a packed case states: which verdict its traces give, with which options, and what was left out."""

from __future__ import annotations

from typing import Literal

import msgspec

from tensortrace.diff.result import Result, Where
from tensortrace.replay.result import Replay
from tensortrace.tracer.errors import DamagedTrace, UnsupportedFormat
from tensortrace.tracer.manifest_json import BadJson, parse_object, to_record
from tensortrace.tracer.types import Kind, Record

FORMAT_VERSION = 1
"""Of ``case.json`` and of the archive around it."""

Of = Literal["diff", "replay"]


class Place(Record, frozen=True):
    """The first boundary that diverges, or disagrees; ``step`` counts from 0 or is ``init``."""

    step: int | Literal["init"]
    microbatch: int | None
    kind: str
    name: str
    slot: str
    call: int


class Expected(Record, frozen=True):
    """A verdict: place and the codes of its causes are what counts, the headline is for people."""

    verdict: str
    headline: str
    first: Place | None = None
    causes: tuple[str, ...] = ()


class Asked(Record, frozen=True):
    """The options that the verdict was given under; those of ``trace diff``, and of ``trace replay``.

    ``rules`` is how many files of ``--expect`` there are. Layout files lie in the traces.
    """

    policy: Literal["error-model", "exact"] = "error-model"
    allow_missing: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    align: str | None = None
    rules: int = 0
    objective: Literal["mean", "sum", "sequence-mean"] | None = None


class Packed(Record, frozen=True):
    """One trace: where it was, what it was recorded with, and how much of it is there."""

    name: str
    world_size: int
    versions: dict[str, str] = {}  # noqa: RUF012  # msgspec copies it
    recorded: int = 0
    boundaries: int = 0
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    without_values: int = 0
    cut: int = 0


class Case(Record, frozen=True, kw_only=True):
    """``case.json``. ``traces`` are in the order of the folders ``a`` and ``b``.

    ``members`` tells the XXH3-128, in hexadecimal, of each file but the page and ``case.json``:
    nothing where it was packed by an earlier version.
    """

    format: int
    of: Of
    expected: Expected
    asked: Asked = Asked()
    packed_by: str = ""
    traces: tuple[Packed, ...] = ()
    minimised: bool = False
    removed: tuple[str, ...] = ()
    members: dict[str, str] = {}  # noqa: RUF012  # msgspec copies it
    ignorable: tuple[str, ...] = ()


def encode_case(case: Case) -> bytes:
    """Return ``case.json``."""
    return msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n"


def decode_case(text: bytes, *, where: str) -> Case:
    """Return what a ``case.json`` states; ``where`` names it for the error.

    Raises DamagedTrace naming the field, UnsupportedFormat for a newer version.
    """
    try:
        found = parse_object(text)
        version = found.get("format")
        if type(version) is not int or version < 1:
            raise DamagedTrace(f"{where}: format is {str(version)[:40]}", expected=f"{FORMAT_VERSION}")
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{where}: a case of a newer format", found=f"format {version}",
                expected=f"at most {FORMAT_VERSION}", remedy="replay it with a newer tensortrace",
            )  # fmt: skip
        listed = found.get("ignorable", [])
        ignorable = tuple(map(str, listed)) if isinstance(listed, list) else ()
        case = to_record(found, Case, ignorable)
    except BadJson as error:
        raise DamagedTrace(f"{where}: {error}") from error
    if len(case.traces) != (2 if case.of == "diff" else 1):
        raise DamagedTrace(f"{where}: {len(case.traces)} traces", expected="two of a diff, one of a replay")
    if not 0 <= case.asked.rules <= MAX_RULES:
        raise DamagedTrace(f"{where}: asked.rules is {case.asked.rules}", expected=f"0 to {MAX_RULES}")
    return case


MAX_RULES = 10
"""Files of ``--expect`` in a case."""


def expected_of(result: Result | Replay) -> Expected:
    """Return what a case states of an outcome."""
    first = result.first_divergent if isinstance(result, Result) else result.first_mismatch
    return Expected(
        result.verdict, result.headline, None if first is None else _place(first.where),
        tuple(cause.code for cause in result.causes),
    )  # fmt: skip


def _place(where: Where) -> Place:
    return Place(where.step, where.microbatch, where.kind, where.name, where.slot, where.call)


def deviations(expected: Expected, found: Expected) -> tuple[str, ...]:
    """Return in what a verdict is not the stated one: the verdict itself, its place, its first cause."""
    said = [
        ("verdict", expected.verdict, found.verdict),
        ("place", _text(expected.first), _text(found.first)),
        ("cause", *(outcome.causes[0] if outcome.causes else "unexplained" for outcome in (expected, found))),
    ]
    if expected.first is None and found.first is None:
        said.pop()
    return tuple(f"{what}: {there}, stated: {stated}" for what, stated, there in said if stated != there)


def _text(place: Place | None) -> str:
    if place is None:
        return "none"
    window = "" if place.microbatch is None else f", microbatch {place.microbatch}"
    call = f" call {place.call}" if place.call else ""
    return f"step {place.step}{window}: {place.kind} {place.name} {place.slot}{call}"
