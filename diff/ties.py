"""Tied parameters under one name, where one run holds as two what is one in the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from msgspec.structs import replace

from tensortrace.tracer.types import Entry, Kind

OF_PARAMETERS = frozenset(
    {
        Kind.LOCAL_GRAD,
        Kind.REDUCED_GRAD,
        Kind.UNSCALED_GRAD,
        Kind.CLIPPED_GRAD,
        Kind.OPTIMIZER_STATE,
        Kind.PARAM,
    }
)
"""Kinds whose name is a parameter's."""

Ties = dict[str, str]
"""Names of parameters that are another parameter's, to that parameter's name."""


def tied(a: Iterable[tuple[int, Entry]], b: Iterable[tuple[int, Entry]]) -> tuple[Ties, Ties]:
    """Return for each run (its entries by rank) which parameter is an alias of another in the other run.

    Stages of a pipeline hold the two uses of a tied weight as two parameters. A run whose ranks hold both as
    two is left alone: there they are not tied.
    """
    left, right = _Parameters.of(a), _Parameters.of(b)
    return _ties(left, right), _ties(right, left)


def _ties(here: _Parameters, other: _Parameters) -> Ties:
    found: Ties = {}
    for name, aliases in other.aliases.items():
        names = [n for n in (name, *aliases) if n in here.ranks]
        apart = all(not here.ranks[x] & here.ranks[y] for x, y in combinations(names, 2))
        if apart and len(names) > 1:
            found.update({n: name for n in names if n != name})
    return found


@dataclass
class _Parameters:
    """The parameters of a run: on which ranks each name is, and its aliases."""

    ranks: dict[str, set[int]]
    aliases: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, entries: Iterable[tuple[int, Entry]]) -> _Parameters:
        ranks: dict[str, set[int]] = defaultdict(set)
        aliases: dict[str, tuple[str, ...]] = {}
        for rank, entry in entries:
            if entry.kind == Kind.PARAM:
                ranks[entry.name].add(rank)
                if entry.meta.aliases:
                    aliases[entry.name] = entry.meta.aliases
        return cls(dict(ranks), aliases)


def renamed(entry: Entry, ties: Ties) -> Entry:
    """Return the entry under the name that a tied parameter has in the other run."""
    if entry.kind in OF_PARAMETERS and entry.name in ties:
        entry = replace(entry, name=ties[entry.name])
    if any(name in ties for name in entry.meta.members):
        members = tuple(dict.fromkeys(ties.get(name, name) for name in entry.meta.members))
        entry = replace(entry, meta=replace(entry.meta, members=members))
    return entry
