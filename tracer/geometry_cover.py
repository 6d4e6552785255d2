"""Whether ranks' parts make a global tensor: replicas, holes and overlaps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Literal, NamedTuple

from tensortrace.tracer.geometry import Held, Interval, Intervals, Region

Trouble = Literal["shape", "hole", "overlap", "copies", "odd"]


class Problem(NamedTuple):
    """What is wrong with a set of parts: which ranks, and where in the global tensor.

    ``shape``: the ranks disagree on the global shape, on flat or not, or on reductions. ``hole``: no rank
    holds ``dims`` (``ranks`` are all that hold other parts). ``overlap``: ``ranks`` hold ``dims``, though
    their parts are not equal. ``copies``: ``dims`` is held by fewer ranks (``ranks``) than the rest.
    ``odd``: ``ranks`` hold other values in ``dims`` than most of their replicas. ``dims`` are intervals per
    dimension, of the flattened tensor where ``flat``. ``partial`` is the contribution that it concerns.
    """

    kind: Trouble
    ranks: tuple[int, ...]
    dims: tuple[Intervals, ...]
    partial: tuple[int, ...] = ()
    flat: bool = False
    detail: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        where = ("flat " if self.flat else "") + show(self.dims)
        part = f" of contribution {self.partial}" if self.partial else ""
        who = ", ".join(map(str, self.ranks[:8])) + (", …" if len(self.ranks) > 8 else "")
        who = f"rank {who}" if len(self.ranks) == 1 else f"ranks {who}"
        texts = {
            "shape": f"{who}: {self.detail}",
            "hole": f"no rank holds {where}{part} ({who} hold other parts)",
            "overlap": f"{who} hold {where}{part}, though their parts differ",
            "copies": f"{where}{part} is held by {who} alone, {self.detail}",
            "odd": f"{who}: other values in {where}{part} than {self.detail}",
        }
        return texts[self.kind]


class ReplicaSet(NamedTuple):
    """The ranks that hold one region (of one contribution, where the tensor is a reduction)."""

    region: Region
    partial: tuple[int, ...]
    parts: tuple[Held, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, in order."""
        return tuple(part.rank for part in self.parts)


def replica_sets(parts: Iterable[Held]) -> tuple[ReplicaSet, ...]:
    """Return the distinct regions that aren't empty, with the parts that hold each, in order of ranks."""
    found: dict[tuple[Region, tuple[int, ...]], list[Held]] = defaultdict(list)
    for part in sorted(parts, key=lambda p: p.rank):
        if part.region.size or not math.prod(part.region.global_shape):
            found[(part.region, part.partial)].append(part)
    return tuple(ReplicaSet(region, partial, tuple(held)) for (region, partial), held in found.items())


def copies(parts: Iterable[Held]) -> int:
    """Return how many complete copies the parts make, provided that ``check`` finds nothing."""
    return min((len(found.parts) for found in replica_sets(parts)), default=0)


def one_copy(parts: Iterable[Held], number: int = 0) -> tuple[Held, ...]:
    """Return one holder of every region: the ``number``-th, or the last where there are fewer."""
    sets = replica_sets(parts)
    return tuple(found.parts[min(number, len(found.parts) - 1)] for found in sets)


def check(parts: Sequence[Held]) -> tuple[Problem, ...]:
    """Return everything that keeps the parts from being one tensor, replicas and contributions allowed.

    Every contribution of a reduction must be covered once (by any number of equal parts). The work is on
    the borders of intervals, never on elements.
    """
    disagreement = _disagreement(parts)
    if disagreement or not parts:
        return disagreement
    sets = replica_sets(parts)
    problems: list[Problem] = []
    for partial in product(*(range(size) for size in parts[0].partial_shape)):
        problems += _check_contribution([s for s in sets if s.partial == partial], partial, parts)
    return tuple(problems)


def odd_replicas(parts: Iterable[Held], digests: Mapping[int, str]) -> tuple[Problem, ...]:
    """Return, by replica set, the ranks whose digest is not the one that most replicas have.

    ``digests`` are by rank. Where no digest has a majority all ranks of the set are odd.
    """
    problems: list[Problem] = []
    for found in replica_sets(parts):
        often = Counter(digests[rank] for rank in found.ranks)
        if len(often) < 2:
            continue
        leaders = [d for d, count in often.items() if count == max(often.values())]
        right = leaders[0] if len(leaders) == 1 else None
        odd = tuple(rank for rank in found.ranks if digests[rank] != right)
        others = [str(rank) for rank in found.ranks if rank not in odd]
        detail = f"ranks {', '.join(others)}" if others else "each other"
        region = found.region
        problems.append(Problem("odd", odd, region.dims, found.partial, region.flat, detail))
    return tuple(problems)


def show(dims: Sequence[Intervals]) -> str:
    """Return intervals per dimension as text: ``[0:4+8:12, 3:5]``."""
    return "[" + ", ".join("+".join(f"{a}:{b}" for a, b in found) or "none" for found in dims) + "]"


def _disagreement(parts: Sequence[Held]) -> tuple[Problem, ...]:
    """Return one problem per way in which parts differ from what most ranks say of the whole."""
    said = {p.rank: (p.region.global_shape, p.region.flat, p.partial_shape, p.ops) for p in parts}
    often = Counter(said.values()).most_common()
    problems = []
    for other, _ in often[1:]:
        ranks = tuple(sorted(rank for rank, found in said.items() if found == other))
        detail = f"found {_said(*other)}, others have {_said(*often[0][0])}"
        problems.append(Problem("shape", ranks, (), detail=detail))
    return tuple(problems)


def _said(shape: tuple[int, ...], flat: bool, partial_shape: tuple[int, ...], ops: tuple[str, ...]) -> str:
    reduced = f", {'/'.join(ops)} over {partial_shape}" if ops else ""
    return f"global shape {shape}{', flat' if flat else ''}{reduced}"


def _check_contribution(
    sets: Sequence[ReplicaSet], partial: tuple[int, ...], parts: Sequence[Held]
) -> list[Problem]:
    region = parts[0].region
    sizes = (math.prod(region.global_shape),) if region.flat else region.global_shape
    everyone = tuple(sorted({p.rank for p in parts}))
    if not math.prod(sizes):
        return []
    problems: list[Problem] = []
    for dims, members in _sweep(sizes, 0, tuple(range(len(sets))), sets, {}):
        if not members:
            problems.append(Problem("hole", everyone, dims, partial, region.flat))
        elif len(members) > 1:
            ranks = tuple(sorted({rank for member in members for rank in sets[member].ranks}))
            problems.append(Problem("overlap", ranks, dims, partial, region.flat))
    return problems + _fewer_copies(sets)


def _fewer_copies(sets: Sequence[ReplicaSet]) -> list[Problem]:
    most = max((len(found.parts) for found in sets), default=0)
    return [
        Problem("copies", s.ranks, s.region.dims, s.partial, s.region.flat, f"other parts by {most} ranks")
        for s in sets
        if len(s.parts) < most
    ]


_Cells = list[tuple[tuple[Intervals, ...], tuple[int, ...]]]


def _sweep(
    sizes: Sequence[int],
    dim: int,
    active: tuple[int, ...],
    sets: Sequence[ReplicaSet],
    known: dict[tuple[int, tuple[int, ...]], _Cells],
) -> _Cells:
    """Return products of intervals of the dimensions from ``dim`` on, each with the sets that hold it.

    What exactly one set holds is left out.
    """
    if dim == len(sizes):
        return [] if len(active) == 1 else [((), active)]
    if not active:
        return [(tuple(((0, n),) for n in sizes[dim:]), ())]
    if (dim, active) in known:
        return known[(dim, active)]
    found: _Cells = []
    for members, intervals in _slabs(sizes[dim], dim, active, sets).items():
        inner = _sweep(sizes, dim + 1, members, sets, known)
        found += [((intervals, *dims), holders) for dims, holders in inner]
    known[(dim, active)] = found
    return found


def _slabs(
    size: int, dim: int, active: tuple[int, ...], sets: Sequence[ReplicaSet]
) -> dict[tuple[int, ...], Intervals]:
    """Cut one dimension where a set begins or ends; return the intervals by the sets that reach into them."""
    changes: dict[int, list[tuple[int, bool]]] = defaultdict(list)
    for member in active:
        for start, stop in sets[member].region.dims[dim]:
            changes[start].append((member, True))
            changes[stop].append((member, False))
    borders = sorted({0, size, *changes})
    inside: set[int] = set()
    slabs: dict[tuple[int, ...], list[Interval]] = defaultdict(list)
    for start, stop in pairwise(borders):
        for member, enters in sorted(changes[start], key=lambda change: change[1]):
            (inside.add if enters else inside.discard)(member)
        here = slabs[tuple(sorted(inside))]
        if here and here[-1][1] == start:
            here[-1] = (here[-1][0], stop)
        else:
            here.append((start, stop))
    return {members: tuple(intervals) for members, intervals in slabs.items()}
