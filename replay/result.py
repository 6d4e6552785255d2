"""The outcome of a replay: typed, with its JSON version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from tensortrace.diff.notebook import card, listing, table
from tensortrace.diff.result import (
    Cause,
    Finding,
    Judged,
    Outcome,
    Power,
    Side,
    Where,
    flat,
    found_html,
    judged_table,
    sides,
)
from tensortrace.tracer.safe import safe

if TYPE_CHECKING:
    import pandas

SCHEMA = "tensortrace.replay/1"

Verdict = Literal["agrees", "mismatch", "incomplete"]


class NotReplayed(Outcome, frozen=True):
    """A group of recorded boundaries that were not re-executed, with the reason."""

    kind: str
    reason: str
    count: int
    examples: tuple[Where, ...]


class Stated(Outcome, frozen=True):
    """The objective that token weights were held against, and what tokens weigh in the first steps."""

    name: str
    text: str
    declared: bool
    weights: tuple[str, ...]


class Replay(Outcome, frozen=True, kw_only=True):
    """The outcome of ``replay``; true where everything that was replayed is what it should be.

    ``replayed`` counts boundaries by kind, of which ``bitwise_equal`` hold the expected value bit by bit;
    ``recomputed`` counts activations that backward computed a second time. ``mismatches`` are in causal
    order. ``lost`` says what makes the replay incomplete.

    >>> from tensortrace import replay
    >>> result = replay.replay("a")
    >>> bool(result), result
    (True, <agrees: ...>)
    >>> [str(finding.where) for finding in result]
    []
    """

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    run: Side
    objective: Stated | None
    first_mismatch: Finding | None
    causes: tuple[Cause, ...]
    mismatches: tuple[Finding, ...]
    replayed: dict[str, int]
    bitwise_equal: int
    recomputed: int
    not_replayed: tuple[NotReplayed, ...]
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    power: Power | None = None
    boundaries: tuple[Judged, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether everything agrees."""
        return self.verdict == "agrees"

    def __iter__(self) -> Iterator[Finding]:
        """Iterate over what does not agree, in causal order."""
        return iter(self.mismatches)

    def __repr__(self) -> str:
        return f"<{self.verdict}: {safe(self.headline, limit=300)}>"

    def to_pandas(self) -> pandas.DataFrame:
        """Return ``boundaries`` as a table, one row each: see ``diff.result.judged_table``."""
        return judged_table(self.boundaries, self.mismatches)

    def _repr_html_(self) -> str:
        """Return what notebooks show: headline, cause, first mismatch, what was replayed."""
        left = [f"{group.kind}, {group.count:,}: {group.reason}" for group in self.not_replayed]
        replayed = f"{self.count:,} boundaries, {self.bitwise_equal:,} bitwise equal"
        return card(
            self.headline,
            found_html(self.headline, self.first_mismatch, self.causes),
            table([("replayed", replayed), *sides(run=self.run)]),
            listing("mismatches", [str(finding.where) for finding in self.mismatches]),
            listing("lost", self.lost), listing("not replayed", left), listing("notes", self.notes),
            mark={"agrees": "good", "mismatch": "bad"}.get(self.verdict, "open"),
        )  # fmt: skip

    @property
    def count(self) -> int:
        """The number of boundaries that were replayed."""
        return sum(self.replayed.values()) + self.recomputed

    def to_json(self) -> bytes:
        """Return the result as JSON, UTF-8, as ``docs/replay.md`` describes it."""
        document = msgspec.structs.asdict(self)
        document["first_mismatch"] = self.first_mismatch and flat(self.first_mismatch)
        document["mismatches"] = [flat(finding) for finding in self.mismatches]
        return msgspec.json.encode(document)
