"""Calls of loss functions that took no part in an objective: no gradient came through them.

Programs compute losses to log them. Where one run does so and the other does not, there is nothing to
compare. A term of the objective that one run has lost is not of this kind: the other's has a token weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tensortrace.diff.losses import FAMILIES
from tensortrace.tracer.types import Entry, Kind

_Pass = tuple[int, int, int | None]
_Ranked = tuple[int, Entry]
Kept = Callable[[int, Entry], Entry | None]
"""Returns an entry of a rank under its call's number among those that count; None for one that doesn't."""


@dataclass
class _Calls:
    """One run's calls by (rank, step, microbatch) and function; those that have a weight are ``used``.

    ``beside`` are those without gradients whose scores a training pass computed: no evaluation has them.
    """

    made: dict[tuple[_Pass, str], set[int]]
    used: dict[tuple[_Pass, str], set[int]]
    beside: dict[tuple[_Pass, str], set[int]]

    def numbers(self, *, used: bool) -> dict[str, set[int]]:
        """Return how many calls of each family count, or don't, in passes where any loss does."""
        trained = {at for at, _ in self.used}
        by_pass: Counter[tuple[_Pass, str]] = Counter()
        for (at, name), calls in self.made.items():
            if at[2] is not None and at in trained:
                own = self.used.get((at, name), set())
                by_pass[at, _family(name)] += len(own if used else calls - own)
        found: dict[str, set[int]] = defaultdict(set)
        for (_, family), count in by_pass.items():
            found[family].add(count)
        return found

    def evaluated(self) -> set[str]:
        """Return the families that are called outside of training passes."""
        return {
            _family(key[1])
            for key, calls in self.made.items()
            if key[0][2] is None and calls - self.beside.get(key, set())
        }

    def watched(self) -> set[str]:
        """Return the families that are called beside training passes."""
        return {_family(name) for _, name in self.beside}


def without_unused(a: Sequence[_Ranked], b: Sequence[_Ranked]) -> tuple[Kept, Kept, tuple[str, ...]]:
    """Return for each run which entries of losses count, and notes of what does not."""
    runs = (_calls(a), _calls(b))
    used, idle = ([run.numbers(used=which) for run in runs] for which in (True, False))
    only = runs[0].evaluated() ^ runs[1].evaluated()
    watched = runs[0].watched() | runs[1].watched()
    logged = {
        family
        for family in {*idle[0], *idle[1]}
        if idle[0][family] - {0} != idle[1][family] - {0} and _nothing_lost(used, idle, family)
    }
    notes = [f"one run alone computes {name} without gradients: not compared" for name in sorted(only)]
    notes += [
        f"{name} of scores that training computed, without gradients, is looked at only: not compared"
        for name in sorted(watched - only)
    ]
    notes += [
        f"one run calls {name} more often, and no gradient comes through those calls: they are not compared"
        for name in sorted(logged)
    ]
    keep_a, keep_b = (_keeping(run, logged, only) for run in runs)
    return keep_a, keep_b, tuple(notes)


def _nothing_lost(
    used: Sequence[dict[str, set[int]]], idle: Sequence[dict[str, set[int]]], family: str
) -> bool:
    """Tell whether all calls that count in one run do in the other: as many, or more where they are cut."""
    a, b = (counts[family] - {0} for counts in used)
    if a == b:
        return True
    looked_at = [any(counts[family]) for counts in idle]
    return (
        looked_at != [True, True]
        and bool(a and b)
        and (min(b) >= max(a) if looked_at[1] else min(a) >= max(b))
    )


def _keeping(run: _Calls, logged: set[str], only: set[str]) -> Kept:
    trained = {at for at, _ in run.used}
    numbers = {key: {call: n for n, call in enumerate(sorted(calls))} for key, calls in run.used.items()}

    def keep(rank: int, entry: Entry) -> Entry | None:
        if entry.kind != Kind.LOSS or entry.name == "backward":
            return entry
        at, family = (rank, entry.step, entry.microbatch), _family(entry.name)
        if entry.microbatch is None:
            beside = entry.call in run.beside.get((at, entry.name), ())
            return None if family in only or beside else entry
        if family not in logged or at not in trained or entry.call not in run.made.get((at, entry.name), ()):
            return entry
        number = numbers.get((at, entry.name), {}).get(entry.call)
        return None if number is None else replace(entry, call=number)

    return keep


def _calls(entries: Sequence[_Ranked]) -> _Calls:
    found = _Calls(defaultdict(set), defaultdict(set), defaultdict(set))
    sources: dict[tuple[_Pass, str, int], set[tuple[int, int]]] = {}
    for rank, entry in entries:
        if entry.kind == Kind.LOSS and entry.name != "backward":
            key = ((rank, entry.step, entry.microbatch), entry.name)
            if entry.slot != "target":  # labels may be recorded of a call that is cut
                found.made[key].add(entry.call)
            if entry.slot == "weight":
                found.used[key].add(entry.call)
            if entry.microbatch is None and entry.producers:
                sources[(*key, entry.call)] = {(rank, event) for event in entry.producers}
    wanted = set().union(*sources.values())
    trained = {
        (rank, entry.event)
        for rank, entry in entries
        if wanted and entry.microbatch is not None and (rank, entry.event) in wanted
    }
    for (at, name, call), events in sources.items():
        if events <= trained:
            found.beside[at, name].add(call)
    return found


def _family(name: str) -> str:
    return next((min(family) for family in FAMILIES if name in family), name)
