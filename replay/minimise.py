"""Finds a small part of a case's traces that says the same: leaves out more and more, and really tries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tensortrace.replay.cut import Atom, Part, atoms_of, whole
from tensortrace.replay.slices import Span, Spans, can_be_cut
from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, ROOT, Entry, Kind

TRIALS, SECONDS = 600, 300.0
"""How many parts are tried, and for how long, unless asked otherwise."""

WORTH_BYTES = 16 << 10
"""How large the tensors are of which less is kept."""

MAX_CUT_DIMS = 4

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

    def narrow(
        self, key: Callable[[Atom, Entry], Hashable], *, dim: int, pivot: Callable[[Entry], int | None]
    ) -> None:
        """Keep of tensors in a group no more of a dimension than is needed, in halves: that with ``pivot``.

        Groups whose tensors are small are left as they are.
        """
        held = (atom for atom in self.part.kept if self._may_be_cut(atom, dim))
        groups = self._groups(held, lambda atom, entry: (key(atom, entry), entry.local_shape[dim]))
        for group in sorted(groups, key=lambda group: -self._bytes(group)):
            if self._bytes(group) >= WORTH_BYTES:
                self._halve(group, dim, pivot)

    def _may_be_cut(self, atom: Atom, dim: int) -> bool:
        entry = self.entries[atom]
        stored = entry.blob is not None or entry.same_as is not None
        return stored and can_be_cut(entry) and len(entry.local_shape) > dim and entry.local_shape[dim] > 1

    def _bytes(self, atoms: Iterable[Atom]) -> int:
        """Return what the values of boundaries take, as far as they are kept."""
        sizes = (
            size_bytes(self.entries[atom].dtype, tuple(end - begin for begin, end in self._spans(atom)))
            for atom in atoms
            if atom not in self.part.bare
        )
        return sum(sizes)

    def _spans(self, atom: Atom) -> Spans:
        return self.part.spans.get(atom) or tuple((0, size) for size in self.entries[atom].local_shape)

    def _halve(self, group: frozenset[Atom], dim: int, pivot: Callable[[Entry], int | None]) -> None:
        pivots = {found for atom in group if (found := pivot(self.entries[atom])) is not None}
        begin, end = self._spans(min(group))[dim]
        while end - begin > 1 and not self.exhausted and self._bytes(group) >= WORTH_BYTES:
            middle = (begin + end) // 2
            halves = ((begin, middle), (middle, end))
            for half in halves:
                if pivots and not half[0] <= min(pivots) < half[1]:
                    continue
                cut = {atom: _with(self._spans(atom), dim, half) for atom in group}
                if self.attempt(self.part._replace(spans={**self.part.spans, **cut})):
                    begin, end = half
                    break
            else:
                return

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
    worst: Sequence[int] = (),
    told: Told = lambda text: None, trials: int = TRIALS, seconds: float = SECONDS,
) -> Part:  # fmt: skip
    """Return a part of the traces of which ``holds`` is true, as it is of all of them.

    ``step`` is that of the verdict (INIT_STEP for ``init``), in the first trace's numbers; the same step of
    the second is ``offset`` less. ``names`` are what its boundary was computed from: with luck no others are
    needed; ``worst`` is the index of its worst element. Steps, kinds, names, ranks and single boundaries are
    left out, then values, then parts of large tensors: what is left cannot be left out alone, unless
    ``trials`` or ``seconds`` ran out.
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
    for dim in range(MAX_CUT_DIMS):
        _narrow(search, dim, names, worst)
    return search.part


def _narrow(search: Search, dim: int, names: frozenset[str], worst: Sequence[int]) -> None:
    """Cut tensors along one dimension, those around the verdict's boundary where its worst element is."""

    def pivot(entry: Entry) -> int | None:
        return worst[dim] if entry.name in names and len(worst) == len(entry.local_shape) else None

    search.narrow(lambda atom, entry: _family(entry), dim=dim, pivot=pivot)


def _with(spans: Spans, dim: int, span: Span) -> Spans:
    return (*spans[:dim], span, *spans[dim + 1 :])


def _family(entry: Entry) -> tuple[str, str]:
    """Return whose tensors are cut alike: a parameter's, or those at one slot of a module."""
    of_module = entry.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.INPUT)
    return entry.name, entry.slot if of_module else ""


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
