"""Which boundaries a trace holds: entries by step, kind and name, with the part of the batch they saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tensortrace.diff.cells import SAMPLE_KINDS, Cells, find_cells
from tensortrace.diff.forerunners import steps_of_passes
from tensortrace.diff.forwards import apart
from tensortrace.diff.history import Values, copies, starts, values_of
from tensortrace.diff.logical import Logical, Member, Placer, Source, Together
from tensortrace.diff.losses import Names, one_name, under_name
from tensortrace.diff.masters import COPY, named_as_copies
from tensortrace.diff.parts import ROW_KINDS, EvalPasses
from tensortrace.diff.parts import Part as Part  # who asks a catalog names its parts
from tensortrace.diff.relaid import RelaidTrace
from tensortrace.diff.sketched import is_bare, read_known, sketched
from tensortrace.diff.slices import SlicedRank, cut_flat
from tensortrace.diff.ties import Ties, renamed, tied
from tensortrace.diff.unused import without_unused
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.types import COMPILED, INIT_STEP, ROOT, Entry, Kind, Window

EVIDENCE_KINDS = frozenset({Kind.RNG, Kind.COLLECTIVE, Kind.OPERATION, Kind.OPERATION_GRAD})
"""Kinds that are shown as evidence and never judged: they differ between correct layouts and programs."""


class Item(NamedTuple):
    """A logical tensor: its entry, who holds it, and the part it belongs to (None for the window's).

    ``cell`` is the data cell of its lowest rank.
    """

    source: Source
    entry: Entry
    part: Part | None
    call: int
    cell: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold a part of the tensor."""
        return self.source.ranks if isinstance(self.source, Together) else (self.source.rank,)

    @property
    def members(self) -> tuple[tuple[int, Entry], ...]:
        """Each rank's own entry."""
        if not isinstance(self.source, Together):
            return ((self.source.rank, self.entry),)
        return tuple((member.rank, member.entry) for member in self.source.members)

    def read(self) -> np.ndarray:
        """Return the tensor as numpy, checked against its digest; see ``read_known`` for unstored ones."""
        return read_known(self.source, self.entry)

    @property
    def readable(self) -> bool:
        """Whether the values are there, or an estimate stands for them."""
        return self.source.stored(self.entry) or sketched(self.source, self.entry) is not None

    @property
    def bare(self) -> bool:
        """Whether the values of the tensor, or of a part of it, were never stored."""
        return is_bare(self.source, self.entry)


class Slot(NamedTuple):
    """What a boundary is called within a step: its key without step and microbatch."""

    phase: str
    kind: Kind
    name: str
    slot: str
    call: int


class Recomputed(NamedTuple):
    """What activation checkpointing computed twice, on one rank: the first pass and the recompute."""

    slot: Slot
    first: Item
    again: Item


@dataclass(frozen=True)
class StepView:
    """The first-pass boundaries of one step over all ranks, and what was recomputed of them.

    ``absent`` are the kinds that the run says it does not have. ``given`` are the parameters that the window
    began with in the place of the run's own, by name.
    """

    step: int
    items: dict[Slot, tuple[Item, ...]]
    parts: tuple[Part, ...]
    by_event: dict[tuple[int, int], tuple[Slot, Part | None]] = field(repr=False)
    recomputed: tuple[Recomputed, ...] = ()
    absent: frozenset[str] = frozenset()
    given: Mapping[str, tuple[Item, ...]] = field(default_factory=dict)

    def began_with(self, name: str, before: StepView) -> tuple[Item, ...]:
        """Return a parameter as the window began, of ranks that hold copies of it all."""
        start, model = (Slot("window", Kind.PARAM, name, slot, 0) for slot in ("start", "model"))
        return self.given.get(name) or self.items.get(start, ()) or before.items.get(model, ())

    def find(self, kind: Kind, *, phase: str | None = None) -> Iterable[tuple[Slot, tuple[Item, ...]]]:
        """Yield the slots of a kind, of one phase where given."""
        return (found for found in self._of_kind.get(kind, ()) if phase in (None, found[0].phase))

    @cached_property
    def _of_kind(self) -> dict[Kind, list[tuple[Slot, tuple[Item, ...]]]]:
        kinds = {slot.kind for slot in self.items}
        return {kind: [held for held in self.items.items() if held[0].kind == kind] for kind in kinds}

    @cached_property
    def first_loss(self) -> dict[int, int]:
        """The event number of each rank's first loss of a training pass."""
        found: dict[int, int] = {}
        for _, items in self.find(Kind.LOSS, phase="train"):
            for item in items:
                rank, event = item.source.rank, item.entry.event
                found[rank] = min(event, found.get(rank, event))
        return found

    @cached_property
    def last_update(self) -> dict[int, int]:
        """The event number of the last parameter of each rank, as the step leaves it."""
        found: dict[int, int] = {}
        for slot, items in self.find(Kind.PARAM):
            for rank, entry in (m for item in items for m in item.members if slot.slot == "model"):
                found[rank] = max(entry.event, found.get(rank, -1))
        return found

    def named(self, kind: Kind, name: str) -> Sequence[Slot]:
        """Return the slots of one kind and name, in the order in which they were recorded."""
        return self._by_name.get((kind, name), ())

    @cached_property
    def compiled(self) -> frozenset[str]:
        """The modules whose call is a graph of torch.compile, inside which nothing is observed."""
        return frozenset(
            slot.name
            for slot, items in self.find(Kind.ACTIVATION)
            if any(item.entry.meta.text == COMPILED for item in items)
        )

    @cached_property
    def _by_name(self) -> dict[tuple[Kind, str], list[Slot]]:
        found: dict[tuple[Kind, str], list[Slot]] = defaultdict(list)
        for slot in self.items:
            found[(slot.kind, slot.name)].append(slot)
        return dict(found)

    def of_member(self, name: str) -> dict[Slot, list[Item]]:
        """Return the schedule's items, by slot, that tell of the optimizer's group that has a parameter."""
        return self._of_member.get(name, {})

    @cached_property
    def _of_member(self) -> dict[str, dict[Slot, list[Item]]]:
        found: dict[str, dict[Slot, list[Item]]] = defaultdict(dict)
        for slot, items in self.find(Kind.SCHEDULE):
            for item in items:
                for name in dict.fromkeys(item.entry.meta.members):
                    found[name].setdefault(slot, []).append(item)
        return dict(found)

    def number(self, item: Item) -> float:
        """Return what an item of the schedule is, which many parameters ask for."""
        key = id(item)
        if key not in self._numbers:
            self._numbers[key] = item, float(item.read())
        return self._numbers[key][1]

    @cached_property
    def _numbers(self) -> dict[int, tuple[Item, float]]:
        return {}  # with the items, whose ids would else go to others

    def calls(self, name: str) -> Sequence[str]:
        """Return the modules that a module called itself, by their names: nothing recorded lies between."""
        return self._called_by.get(name, ())

    @cached_property
    def _called_by(self) -> dict[str, list[str]]:
        called = list(dict.fromkeys(slot.name for slot in self.items if slot.kind == Kind.ACTIVATION))
        known, found = set(called), defaultdict[str, list[str]](list)
        for name in called:
            outer = next((o for o in enclosing(name) if o in known or o == ROOT), ROOT)
            if name != outer:
                found[outer].append(name)
        return dict(found)

    def producers(self, item: Item) -> Iterator[tuple[Slot, Part]]:
        """Yield the boundaries of passes from which a tensor's parts were computed, on any rank."""
        for rank, entry in item.members:
            for event in entry.producers:
                slot, part = self.by_event.get((rank, event), (None, None))
                if slot is not None and part is not None:
                    yield slot, part

    def passes_of(self, cell: int) -> dict[int, int]:
        """Return the number of training passes of each rank of a data cell that recorded any."""
        counts: dict[int, int] = {}
        for (rank, _), (_, part) in self.by_event.items():
            if part is not None and part.phase == "train" and part.rank == cell:
                counts[rank] = max(counts.get(rank, 0), part.number + 1)
        return counts

    def last_microbatch(self) -> int:
        """Return the number of the window's last microbatch, 0 where there is none."""
        return max((part.number for part in self.parts if part.phase == "train"), default=0)


def enclosing(name: str) -> Iterator[str]:
    """Yield what a dotted name lies in, innermost first, the root last."""
    while name:
        name = name.rpartition(".")[0]
        yield name or ROOT


VIEWS = 6
"""Steps of which a catalog keeps the logical tensors."""


class Catalog:
    """The boundaries of one opened trace, step by step; of those after step ``until`` nothing is known."""

    def __init__(self, trace: Trace, until: int | None = None) -> None:
        self.trace = trace
        self._by_step: dict[int, list[tuple[RankTrace, Entry]]] = defaultdict(list)
        ranks = cut_flat(trace.ranks)
        sliced = {rank.rank: rank.masters for rank in ranks if isinstance(rank, SlicedRank)}
        called, in_own_step = named_as_copies(ranks, sliced), steps_of_passes(ranks)
        for source in ranks:
            for entry in source.entries:
                known = in_own_step(source.rank, called(source.rank, entry) if called else entry)
                if until is not None and known.step > until:
                    continue
                self._by_step[known.step].append((source, known))
        self._placer = _placer(trace, ranks)
        self._ties: Ties = {}
        self._losses = Names()
        self._views: dict[int, StepView] = {}

    @staticmethod
    def tie(a: Catalog, b: Catalog) -> tuple[str, ...]:
        """Let what the runs have under several names meet under one: tied parameters, a loss by hand.

        Losses that one run alone computes, and no gradient comes through, are left out; return notes of them.
        """
        kept_a, kept_b, notes = without_unused(list(a._ranked()), list(b._ranked()))
        for side, kept in ((a, kept_a), (b, kept_b)) if notes else ():
            for step, held in side._by_step.items():
                found = ((source, kept(source.rank, entry)) for source, entry in held)
                side._by_step[step] = [(source, entry) for source, entry in found if entry is not None]
        _apart(a, b)
        a._ties, b._ties = tied(a._ranked(), b._ranked())
        a._losses, b._losses = one_name(*((entry for _, entry in side._ranked()) for side in (a, b)))
        for side in (a, b):
            side._views.clear()
        return notes

    def _ranked(self) -> Iterator[tuple[int, Entry]]:
        return ((source.rank, entry) for held in self._by_step.values() for source, entry in held)

    def recorded(self, step: int) -> Sequence[tuple[RankTrace, Entry]]:
        """Return what ranks recorded in a step, entry by entry."""
        return self._by_step.get(step, ())

    @property
    def cells(self) -> Cells:
        """Which ranks work on the same samples."""
        return self._placer.cells

    def together(self, kind: Kind, members: Sequence[Member]) -> list[Logical]:
        """Return the logical tensors that entries of several ranks make, one for each data cell."""
        return self._placer.merge(kind, members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that recorded anything."""
        return tuple(source.rank for source in self.trace.ranks)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps recorded, in order; ``init`` is not among them."""
        return tuple(sorted(step for step in self._by_step if step != INIT_STEP))

    @property
    def has_init(self) -> bool:
        """Tell whether the state before the first step was recorded."""
        return INIT_STEP in self._by_step

    def cut_at(self, step: int) -> bool:
        """Tell whether some rank's recording ended before the end of a step."""
        return self._first_cut is not None and step >= self._first_cut

    def is_whole(self, step: int) -> bool:
        """Tell whether nothing that was promised of a step, or of one before it, is lost."""
        return not self.lossy and not self.cut_at(step)

    @cached_property
    def _first_cut(self) -> int | None:
        manifests = [r.manifest for r in self.trace.ranks]
        world = max((m.world_size for m in manifests if m), default=len(manifests))
        if world > len(manifests):
            return INIT_STEP
        last = [
            max((e.step for e in r.entries), default=INIT_STEP)
            for r in self.trace.ranks
            if not (r.manifest and r.manifest.ended == "finished")
        ]
        return min(last, default=None)

    @cached_property
    def lossy(self) -> bool:
        """Tell whether some rank dropped boundaries that were promised, or its index lost some since."""
        manifests = ((r.manifest, len(r.entries)) for r in self.trace.ranks if r.manifest)
        return any(m.drops.count or entries < m.boundaries for m, entries in manifests)

    def would_hold(self, kind: Kind, name: str, step: int) -> bool:
        """Tell whether such a boundary would be there if the run had it: it was promised, nothing is lost."""
        return self.is_whole(step) and self.promised(kind, name, step)

    def promised(self, kind: Kind, name: str, step: int) -> bool:
        """Tell whether the recording selected such a boundary; true where nothing is known of it."""
        manifest = next((r.manifest for r in self.trace.ranks if r.manifest), None)
        if manifest is None:
            return True
        window = manifest.window or Window()
        kept = window.first <= step and (window.last is None or step <= window.last)
        return kept and Selection(manifest.promise).wants(kind, name, step=step)

    def records(self, step: int, kind: Kind, slot: str) -> bool:
        """Tell whether some rank recorded such a slot in a step, which takes no view of it."""
        held = self._by_step.get(step, ())
        return any(entry.slot == slot and entry.kind == kind for _, entry in held)

    def view(self, step: int) -> StepView:
        """Return one step's boundaries as logical tensors; empty where the step was not recorded.

        The last few are kept: aligning steps looks at the same ones again and again.
        """
        known = self._views.pop(step, None)
        self._views[step] = found = known or self._viewed(step)
        if len(self._views) > VIEWS:
            del self._views[next(iter(self._views))]
        return found

    def _viewed(self, step: int) -> StepView:
        found: dict[tuple[Slot, int], list[Member]] = defaultdict(list)
        by_event: dict[tuple[int, int], tuple[Slot, Part | None]] = {}
        again: list[Member] = []
        passes = EvalPasses()
        for source, entry in self._by_step.get(step, ()):
            named = under_name(self._named(entry), self._losses)
            if named is None:
                continue
            entry = named
            if entry.recompute:
                again.append(Member(source, entry))
            else:
                made = any(not _is_given(by_event.get((source.rank, e))) for e in entry.producers)
                part, call = passes.place(source.rank, self.cells.cell(source.rank), entry, computed=made)
                slot = Slot(part.phase if part else "window", entry.kind, entry.name, entry.slot, call)
                number = part.number if part else -1 if entry.microbatch is None else entry.microbatch
                found[(slot, number)].append(Member(source, entry))
                by_event[(source.rank, entry.event)] = (slot, part)
        for slot, members in self._held(step):
            found[(slot, -1)] = members
        items: dict[Slot, list[Item]] = defaultdict(list)
        for (slot, number), members in found.items():
            for holder, entry in self._placer.merge(slot.kind, members):
                cell = self.cells.cell(holder.rank)
                part = None if slot.phase == "window" else Part(cell, slot.phase, number)
                items[slot].append(Item(holder, entry, part, slot.call, cell))
        parts = {part for _, part in by_event.values() if part}
        frozen = {slot: tuple(held) for slot, held in items.items()}
        recomputed = tuple(self._recomputed(again, found))
        return StepView(step, frozen, tuple(sorted(parts)), by_event, recomputed, self._absent)

    def _held(self, step: int) -> Iterator[tuple[Slot, list[Member]]]:
        """Yield what ranks have of parameters in a step, where not all of them recorded it then."""
        if not self.is_whole(step):
            return
        if step > 0:
            for name, members in starts(step, self._values).items():
                yield Slot("window", Kind.PARAM, name, "start", 0), members
        if step >= 0:
            for name, members in copies(step, self._copied).items():
                yield Slot("window", Kind.PARAM, name, COPY, 0), members

    @cached_property
    def _values(self) -> Values:
        return values_of(("model", "start"), self._by_step, self._named)

    @cached_property
    def _copied(self) -> Values:
        """The values of parameters that are copied from masters."""
        return values_of((COPY,), self._by_step, self._named)

    def _named(self, entry: Entry) -> Entry:
        """Return an entry under the name that both runs have of its parameter."""
        return renamed(entry, self._ties) if self._ties else entry

    @cached_property
    def _absent(self) -> frozenset[str]:
        declared = [set(r.manifest.absent) for r in self.trace.ranks if r.manifest]
        return frozenset(set.intersection(*declared)) if declared else frozenset()

    def _recomputed(
        self, again: Sequence[Member], found: Mapping[tuple[Slot, int], Sequence[Member]]
    ) -> Iterator[Recomputed]:
        """Yield each recompute of a forward pass with its rank's own first pass, in order of events."""
        for member in again:
            entry = member.entry
            if entry.microbatch is None or entry.kind not in ROW_KINDS:
                continue
            slot = Slot("train", entry.kind, entry.name, entry.slot, entry.call)
            own = (m for m in found.get((slot, entry.microbatch), ()) if m.rank == member.rank)
            first = next(own, None)
            if first is not None:
                cell = self.cells.cell(member.rank)
                part = Part(cell, "train", entry.microbatch)
                yield Recomputed(
                    slot,
                    Item(first.source, first.entry, part, entry.call, cell),
                    Item(member.source, entry, part, entry.call, cell),
                )


def _is_given(producer: tuple[Slot, Part | None] | None) -> bool:
    """Tell whether what a tensor came from was given to a module, and not computed."""
    return producer is not None and (producer[0].kind == Kind.INPUT or producer[0].slot.startswith("in."))


def _apart(a: Catalog, b: Catalog) -> None:
    """Let forward passes that one run makes in one microbatch be microbatches, as the other's are."""
    sides = [(side, sorted(side._by_step)) for side in (a, b)]
    held = [[[(src.rank, e) for src, e in side._by_step[step]] for step in steps] for side, steps in sides]
    for (side, steps), found in zip(sides, apart(*held), strict=True):
        for step, entries in zip(steps, found or (), strict=False):
            known = side._by_step[step]
            side._by_step[step] = [(src, e) for (src, _), e in zip(known, entries, strict=True)]


def _placer(trace: Trace, ranks: Sequence[RankTrace]) -> Placer:
    """Return what knows where the entries of a trace's ranks lie."""
    meshes = {
        (source.rank, name): mesh
        for source in ranks
        if source.manifest
        for name, mesh in source.manifest.meshes.items()
    }
    shards = [
        (entry, (meshes[(source.rank, entry.shard.mesh)], entry.shard))
        for source in ranks
        for entry in source.entries
        if entry.shard and (source.rank, entry.shard.mesh) in meshes
    ]
    labelled = {placed for entry, placed in shards if entry.kind in SAMPLE_KINDS}
    compiled = any(entry.meta.text == COMPILED for source in ranks for entry in source.entries)
    spread = {placed for entry, placed in shards if compiled and entry.kind == Kind.PARAM}
    rules = trace.layout if isinstance(trace, RelaidTrace) else None
    declared = (rules.mesh, rules.axes_of_data) if rules else None
    cells = find_cells((source.rank for source in ranks), labelled, meshes.values(), declared, spread=spread)
    return Placer(cells, meshes)
