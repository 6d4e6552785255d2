"""What ranks have of parameters that they did not record anew: the value that each recorded last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tensortrace.diff.logical import Member
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, Kind

Values = Mapping[str, Mapping[int, Sequence[Member]]]
"""Every recorded value of each parameter, by rank, in order of events."""


def values_of(
    slots: Sequence[str],
    by_step: Mapping[int, Iterable[tuple[RankTrace, Entry]]],
    named: Callable[[Entry], Entry],
) -> Values:
    """Return the values that parameters have in some slots; ``named`` gives an entry its parameter's name."""
    found: dict[str, dict[int, list[Member]]] = defaultdict(lambda: defaultdict(list))
    for step in sorted(by_step):
        for source, entry in by_step[step]:
            if entry.kind == Kind.PARAM and entry.slot in slots and not entry.call:
                entry = named(entry)
                found[entry.name][source.rank].append(Member(source, entry))
    return found


def starts(step: int, values: Values) -> dict[str, list[Member]]:
    """Return the parameters that changed between updates on some ranks, with those of the other ranks.

    A rank records a parameter again only where it changed: what it recorded last is what it still has.
    Where some ranks' last is of an older step than that of others, they missed what those have.
    """
    found: dict[str, list[Member]] = {}
    for name, of_ranks in values.items():
        last = {rank: _last_before(step, entries) for rank, entries in of_ranks.items()}
        known = [member for member in last.values() if member is not None]
        began = any((m.entry.step, m.entry.slot) == (step, "start") for m in known)
        behind = len({_age(m.entry) for m in known}) > 1
        if len(known) == len(last) > 1 and (began or behind):
            found[name] = sorted(known, key=lambda member: member.rank)
    return found


def copies(step: int, values: Values) -> dict[str, list[Member]]:
    """Return what the passes of a step compute with where updates are made to masters of parameters.

    Recorded anew only where it changed: one that was not copied back is what it was.
    """
    found: dict[str, list[Member]] = {}
    for name, of_ranks in values.items():
        known = [m for entries in of_ranks.values() if (m := _last_copy(step, entries)) is not None]
        if len(known) == len(of_ranks):
            found[name] = sorted(known, key=lambda member: member.rank)
    return found


def _last_before(step: int, members: Sequence[Member]) -> Member | None:
    """Return what a rank had of a parameter when a step began."""
    known = [m for m in members if m.entry.step < step or (m.entry.step, m.entry.slot) == (step, "start")]
    return max(known, key=lambda m: (m.entry.step, m.entry.event), default=None)


def _last_copy(step: int, members: Sequence[Member]) -> Member | None:
    """Return what a rank's modules had of a parameter in the passes of a step."""
    return max((m for m in members if m.entry.step <= step), key=lambda m: m.entry.event, default=None)


def _age(entry: Entry) -> int:
    """Return of which update a value is: one recorded when a step began is of the step before."""
    return entry.step - 1 if entry.slot == "start" else entry.step
