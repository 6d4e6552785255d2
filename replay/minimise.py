"""Finds a small part of a case's traces that says the same: leaves out more and more, and really tries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tensortrace.replay.cut import Atom, Part, atoms_of, whole
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, ROOT, Entry, Kind

TRIALS, SECONDS = 600, 300.0
"""How many parts are tried, and for how long, unless asked otherwise."""

Holds = Callable[[Part], bool]
Told = Callable[[str], None]


@dataclass
class Search:
    """The smallest part found so far; each smaller one is kept if ``holds`` says that it says the same.

    It ends after ``trials`` or ``seconds``; what was found by then stands.
    """

    entries: dict[Atom, Entry]
    holds: Holds
    part: Part
    told: Told = lambda text: None
    trials: int = TRIALS
    seconds: float = SECONDS
    tried: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def exhausted(self) -> bool:
        """Whether no more may be tried."""
        return self.tried >= self.trials or time.monotonic() - self._began > self.seconds

    def attempt(self, part: Part) -> bool:
        """Try a part, and go on from it if it holds."""
        if part == self.part:
            return True
        if self.exhausted or not part.kept:
            return False
        self.tried += 1
        kept, count = len(self.part.kept), len(self.entries)
        self.told(f"minimising: {kept} of {count} boundaries left after {self.tried} tries")
        if not self.holds(part):
            return False
        self.part = part
        return True

    def leave_out(self, key: Callable[[Atom, Entry], Hashable]) -> None:
        """Leave out what can be, in groups of boundaries with one key: half of them, a quarter, …, each."""
        self._shrink(self._groups(self.part.kept, key), Part.without)

    def leave_bare(self, key: Callable[[Atom, Entry], Hashable]) -> None:
        """Keep no values of what can do without, in such groups, too."""
        held = self.part.kept - self.part.bare
        stored = (atom for atom in held if self.entries[atom].blob or self.entries[atom].same_as is not None)
        self._shrink(self._groups(stored, key), Part.bared)

    def _groups(self, atoms: Iterable[Atom], key: Callable[[Atom, Entry], Hashable]) -> list[frozenset[Atom]]:
        found: dict[Hashable, set[Atom]] = defaultdict(set)
        for atom in sorted(atoms):
            found[key(atom, self.entries[atom])].add(atom)
        return [frozenset(group) for group in found.values()]

    def _shrink(
        self, groups: Sequence[frozenset[Atom]], smaller: Callable[[Part, frozenset[Atom]], Part]
    ) -> None:
        left, size = list(groups), len(groups)
        while size and not self.exhausted:
            start = 0
            while start < len(left):
                some = frozenset().union(*left[start : start + size])
                if self.attempt(smaller(self.part, some)):
                    del left[start : start + size]
                else:
                    start += size
            size //= 2


def minimise(
    traces: Sequence[Trace], holds: Holds, *, step: int, names: frozenset[str] = frozenset(), offset: int = 0,
    told: Told = lambda text: None, trials: int = TRIALS, seconds: float = SECONDS,
) -> Part:  # fmt: skip
    """Return a part of the traces of which ``holds`` is true, as it is of all of them.

    ``step`` is that of the verdict (INIT_STEP for ``init``), in the first trace's numbers; the same step of
    the second is ``offset`` less. ``names`` are what its boundary was computed from: with luck no others are
    needed. Steps, kinds, names, ranks and single boundaries are left out, then values: what is left cannot be
    left out alone, unless ``trials`` or ``seconds`` ran out.
    """
    entries = dict(atoms_of(traces))
    search = Search(entries, holds, whole(traces), told, trials, seconds)

    def number(atom: Atom, entry: Entry) -> int:
        return entry.step + offset * atom.side if entry.step != INIT_STEP else INIT_STEP

    for wanted in _guesses(names):
        some = {atom: number(atom, entry) for atom, entry in entries.items() if wanted(entry)}
        windows = (frozenset(atom for atom in some if some[atom] in steps) for steps in _windows(step))
        if any(search.attempt(Part(kept)) for kept in windows):
            break
    search.leave_out(lambda atom, entry: entry.kind)
    search.leave_out(lambda atom, entry: _owner(entry))
    search.leave_out(lambda atom, entry: (number(atom, entry), entry.kind, _owner(entry)))
    search.leave_out(lambda atom, entry: (atom.side, atom.rank))
    search.leave_out(lambda atom, entry: (number(atom, entry), entry.microbatch, entry.key[2:]))
    search.leave_bare(lambda atom, entry: (entry.kind, _owner(entry)))
    search.leave_bare(lambda atom, entry: (number(atom, entry), entry.microbatch, entry.key[2:]))
    return search.part


def _windows(step: int) -> Iterator[frozenset[int]]:
    """Yield sets of steps that may be enough for a verdict, the smallest first; none lies behind its own."""
    yield frozenset({step})
    yield frozenset({INIT_STEP, step})
    yield frozenset({step - 1, step})
    yield frozenset({INIT_STEP, step - 1, step})
    yield frozenset(range(INIT_STEP, step + 1))


def _guesses(names: frozenset[str]) -> Iterator[Callable[[Entry], bool]]:
    """Yield tests for what may be enough: cheap ones, which save most of the work if they are, then all."""

    def near(entry: Entry) -> bool:
        given = entry.name == ROOT and entry.slot.startswith("in.")
        return entry.name in names or entry.kind == Kind.INPUT or given

    yield near
    yield lambda entry: near(entry) or entry.kind in _SMALL or entry.name.startswith("(")
    yield lambda entry: near(entry) or entry.kind in _SMALL | _GRADIENTS or entry.name.startswith("(")
    yield lambda entry: True


_SMALL = frozenset({Kind.LOSS, Kind.SCHEDULE})
_GRADIENTS = frozenset({Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD})


def _owner(entry: Entry) -> str:
    """Return the module that a boundary belongs to: a parameter's is its own."""
    return entry.name.rpartition(".")[0] if entry.kind not in _OF_MODULES else entry.name


_OF_MODULES = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.INPUT, Kind.LOSS, Kind.SCHEDULE})
