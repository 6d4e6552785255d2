"""Whether a layout file fits a trace: holes, overlaps, odd replicas, shapes, rules that are of nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tensortrace.diff.relaid import RelaidRank
from tensortrace.diff.shared import odd_shared
from tensortrace.diff.stated import states, with_stated
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.geometry import Held, held
from tensortrace.tracer.geometry_cover import check, odd_replicas
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.rules.document import LayoutFileError
from tensortrace.tracer.rules.names import match_glob
from tensortrace.tracer.rules.run import SAMPLE_KINDS
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

_JUDGED = frozenset(Kind) - {
    Kind.RNG, Kind.COLLECTIVE, Kind.SCHEDULE, Kind.OPERATION, Kind.OPERATION_GRAD,
}  # fmt: skip

_SHAPED = frozenset({Kind.PARAM, Kind.ACTIVATION})

_TAKEN_APART = frozenset({Kind.LOCAL_GRAD})
"""Kinds of which a rank may lack its part: a tied parameter's use exists where the use is."""


class _Group(NamedTuple):
    """What ranks of one data cell hold together: a boundary, and their coordinate along axes of data."""

    step: int
    microbatch: int | None
    kind: Kind
    name: str
    slot: str
    call: int
    cell: tuple[int, ...]

    def __str__(self) -> str:
        step = "init" if self.step == INIT_STEP else f"step {self.step}"
        microbatch = "" if self.microbatch is None else f" microbatch {self.microbatch}"
        return f"{step}{microbatch}: {self.kind} {self.name} {self.slot}"


Shapes = Mapping[tuple[Kind, str, str], tuple[int, ...]]
"""Shapes in the unpartitioned program by kind, name and slot; of activations all but the first dimension."""


def shapes_of(trace: Trace) -> Shapes:
    """Return what a trace of the unpartitioned program tells of shapes."""
    found: dict[tuple[Kind, str, str], tuple[int, ...]] = {}
    for rank in trace.ranks:
        for entry in rank.entries:
            if entry.kind in _SHAPED:
                found.setdefault((entry.kind, entry.name, entry.slot), _shape(entry.kind, entry.local_shape))
    return found


def _shape(kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if kind == Kind.PARAM else shape[1:]


def audit(trace: Trace, layout: RunLayout, shapes: Shapes | None = None) -> list[str]:
    """Return everything in which a layout doesn't fit the initial state and the first step of a trace.

    Each line names the rule or the boundary, the ranks, and the ranges in the global tensor.
    """
    try:
        world = [rank.manifest.world_size for rank in trace.ranks if rank.manifest]
        layout.check_world(max(world, default=len(trace.ranks)))
    except LayoutFileError as error:
        return [str(error)]
    trace, vain = with_stated(trace, layout)
    return list(vain) + list(dict.fromkeys(_Audit(trace, layout, shapes or {}).problems()))


class _Audit:
    """Places every entry, then looks at what the ranks hold together."""

    def __init__(self, trace: Trace, layout: RunLayout, shapes: Shapes) -> None:
        self.trace, self.layout, self.shapes = trace, layout, shapes
        self.parts: dict[_Group, list[tuple[Held, str]]] = defaultdict(list)
        self.sharing: dict[_Group, list[tuple[RelaidRank, Entry]]] = defaultdict(list)
        self.without: dict[_Group, dict[int, str]] = defaultdict(dict)
        self.names: set[tuple[Kind, str, str]] = set()
        self.data = [layout.mesh.axes.index(axis) for axis in layout.axes_of_data]

    def problems(self) -> Iterator[str]:
        """Yield what is wrong, the rules first."""
        found: dict[tuple[str, str], str] = {}
        for rank in self.trace.ranks:
            steps = {entry.step for entry in rank.entries}
            first = min(steps - {INIT_STEP}, default=INIT_STEP)
            for entry in rank.entries:
                if entry.kind in _JUDGED and entry.step in (INIT_STEP, first) and not entry.recompute:
                    try:
                        self._place(entry, rank)
                    except TraceError as error:
                        found.setdefault((str(error).partition(":")[0], entry.name), str(error))
        yield from found.values()
        yield from self._unused()
        yield from self._without_rule()
        yield from self._together()
        yield from self._shared()

    def _place(self, entry: Entry, source: RankTrace) -> None:
        rank = source.rank
        name = self.layout.canonical(entry.name, rank)
        if not name:
            return
        self.names.add((entry.kind, name, entry.slot))
        if states(entry) and entry.shard is not None and not self.layout.names_exactly(entry, name):
            mesh = source.manifest.meshes.get(entry.shard.mesh) if source.manifest else None
            part = held(rank, entry.shard, mesh or self.layout.mesh, entry.local_shape)
            group = self._group(entry, name, tuple(self.layout.where(rank).values()))
            self.parts[group].append((part, entry.digest))
            return
        views = self.layout.views(entry.kind, entry.slot, entry.name, rank, entry.local_shape)
        for view in views:
            group = self._group(entry, view.name, view.shard.coordinate)
            digest = f"{entry.digest} {view.picked}"
            self.parts[group].append((held(rank, view.shard, self.layout.mesh, view.local_shape), digest))
        if not views and entry.kind in SAMPLE_KINDS | {Kind.PARAM}:
            where = self.layout.where(rank)
            self.without[self._group(entry, name, tuple(where.values()))][rank] = entry.digest

        if self.layout.shares(entry.kind, entry.slot, name):
            for new in (one := RelaidRank(source, self.layout, (entry,))).entries:
                group = self._group(entry, new.name, tuple(self.layout.where(rank).values()))
                self.sharing[group].append((one, new))

    def _group(self, entry: Entry, name: str, coordinate: tuple[int, ...]) -> _Group:
        of_data = entry.kind in SAMPLE_KINDS
        cell = tuple(coordinate[axis] for axis in self.data) if of_data else ()
        return _Group(entry.step, entry.microbatch, entry.kind, name, entry.slot, entry.call, cell)

    def _unused(self) -> Iterator[str]:
        names = {name for _, name, _ in self.names}
        for rule in self.layout.rules:
            for glob, pattern in zip(rule.written.globs, rule.names, strict=True):
                if not any(match_glob(pattern, name) for name in names):
                    yield (
                        f"{self.layout.path}: {rule.title}: name: {glob!r} matches nothing in the trace; "
                        "correct it, or remove the rule (`trace show` lists the names)"
                    )

    def _without_rule(self) -> Iterator[str]:
        told: set[tuple[Kind, str, str]] = set()
        for group, digests in self.without.items():
            place = (group.kind, group.name, group.slot)
            elsewhere = group.kind == Kind.LOSS and self.layout.axes_of_stages  # the last stage alone has it
            if len(set(digests.values())) > 1 and place not in told and not elsewhere:
                told.add(place)
                ranks = ", ".join(map(str, sorted(digests)[:8]))
                yield f"{group}: ranks {ranks} hold different tensors and no rule is of them"

    def _shared(self) -> Iterator[str]:
        told: set[tuple[Kind, str, str]] = set()
        for group, members in self.sharing.items():
            place = (group.kind, group.name, group.slot)
            if (odd := odd_shared(members)) and place not in told:
                told.add(place)
                ranks = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd[:8]))
                yield f"{group}: {ranks}: other values in blocks that all ranks have than the other ranks"

    def _together(self) -> Iterator[str]:
        told: set[tuple[Kind, str, str, str]] = set()
        for group, parts in self.parts.items():
            members = [part for part, _ in parts]
            problems = list(check(members))
            if group.kind in _TAKEN_APART:
                problems = [p for p in problems if p.kind != "hole" or not p.partial]
            if not problems:
                problems = list(odd_replicas(members, {part.rank: digest for part, digest in parts}))
            for problem in problems:
                key = (group.kind, group.name, group.slot, problem.kind)
                if key not in told:
                    told.add(key)
                    yield f"{group}: {problem}"
            whole = _shape(group.kind, members[0].region.global_shape)
            place = (group.kind, group.name, group.slot)
            wanted = self.shapes.get(place, whole)
            if wanted != whole and (*place, "shape") not in told:
                told.add((*place, "shape"))
                rest = "" if group.kind == Kind.PARAM else " behind the first dimension"
                yield f"{group}: global shape {whole}{rest}, expected {wanted} as in the other trace"
