"""Which boundaries of a trace are asked for: steps, kinds, a name, ranks."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from tensortrace.tracer.nearest import nearest_to_glob
from tensortrace.tracer.selection import parse_kinds, parse_steps
from tensortrace.tracer.types import Boundary, Kind, Record


class Request(Record, frozen=True):
    """Which boundaries are asked for; empty fields select everything."""

    steps: tuple[tuple[int, int], ...] = ()
    kinds: tuple[Kind, ...] = ()
    name: str | None = None
    ranks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether the request narrows anything."""
        return bool(self.steps or self.kinds or self.name is not None or self.ranks)

    def wants_step(self, step: int) -> bool:
        """Tell whether anything of a step is asked for."""
        return not self.steps or any(first <= step <= last for first, last in self.steps)

    def wants_key(self, kind: Kind, name: str) -> bool:
        """Tell whether a boundary of this kind and name is; a name is taken literally, then as a glob."""
        return (not self.kinds or kind in self.kinds) and self._wants_name(name)

    def wants(self, rank: int, entry: Boundary) -> bool:
        """Tell whether the entry of this rank is asked for."""
        wanted = not self.ranks or rank in self.ranks
        return wanted and self.wants_step(entry.step) and self.wants_key(entry.kind, entry.name)

    def nearest_name(self, names: Iterable[str]) -> str | None:
        """Return the name that the one asked for is nearest to, None where it is none's or one's own."""
        known = dict.fromkeys(names)
        if self.name is None or any(map(self._wants_name, known)):
            return None
        return nearest_to_glob(self.name, known)

    def _wants_name(self, name: str) -> bool:
        return self.name is None or name == self.name or fnmatch.fnmatchcase(name, self.name)


def parse_request(
    *, steps: str = "", kinds: str = "", name: str | None = None, ranks: tuple[int, ...] = ()
) -> Request:
    """Return the request that the options state; raises BadRequest where one is malformed.

    Unlike in a recording, step 0 does not include ``init``: it is named if it is wanted.
    """
    return Request(asked_steps(steps) if steps else (), parse_kinds(kinds) if kinds else (), name, ranks)


def asked_steps(text: str, *, option: str = "--step") -> tuple[tuple[int, int], ...]:
    """Return the ranges of ``init,0-3`` as inclusive pairs: ``init`` only where it is named."""
    ranges = parse_steps(text, option=option)
    if "init" in [part.strip() for part in text.split(",")]:
        return ranges
    return tuple((max(first, 0), last) for first, last in ranges)
