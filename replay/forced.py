"""The outcome of a live run that was given recorded values: typed, with its JSON version."""

from __future__ import annotations

from typing import Literal

import msgspec

from tensortrace.diff.result import Cause, Finding, Missing, Outcome, Power, Side, Where, flat

SCHEMA = "tensortrace.forced/1"

Verdict = Literal["agrees", "mismatch", "incomplete"]
Part = Literal["module", "between", "loss", "input", "gradients", "update"]


class Faulty(Outcome, frozen=True):
    """One place that errs by itself: what it was given agrees, and what it made does not.

    ``name`` is a module (``between`` where it is code of its own between the modules inside it), a loss, or
    the first tensor of a reduction, a clip or an update. ``forward`` and ``backward`` are the greatest
    relative L2 errors of what it made in each direction, None where that agrees or has no number.
    ``boundaries`` are at most 8 of ``count`` in ``steps``; ``first`` is the first of them.
    """

    part: Part
    name: str
    forward: float | None
    backward: float | None
    wrong_in: tuple[str, ...]
    steps: tuple[int | str, ...]
    first: Finding
    causes: tuple[Cause, ...]
    boundaries: tuple[Where, ...]
    count: int


class NotForced(Outcome, frozen=True):
    """Boundaries of a kind that the live run kept as they were, with the reason; names are at most 3."""

    kind: str
    reason: str
    count: int
    examples: tuple[str, ...]


class Forced(Outcome, frozen=True, kw_only=True):
    """The outcome of ``force``; true where every part of the live run computes what was recorded.

    ``kinds`` are what was asked for, ``forced`` counts boundaries by kind. ``follow`` counts divergences that
    come from those in ``faulty``.
    """

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    recorded: Side
    live: Side
    command: tuple[str, ...]
    kinds: tuple[str, ...]
    forced: dict[str, int]
    not_forced: tuple[NotForced, ...]
    faulty: tuple[Faulty, ...]
    compared: int
    bitwise_equal: int
    follow: int
    missing: tuple[Missing, ...] = ()
    notes: tuple[str, ...] = ()
    power: Power | None = None

    def __bool__(self) -> bool:
        """Tell whether everything agrees."""
        return self.verdict == "agrees"

    def to_json(self) -> bytes:
        """Return the result as JSON, UTF-8, as ``docs/replay.md`` describes it."""
        document = msgspec.structs.asdict(self)
        document["faulty"] = [msgspec.structs.asdict(f) | {"first": flat(f.first)} for f in self.faulty]
        return msgspec.json.encode(document)
