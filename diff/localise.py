"""Where in a tensor the difference lies: rows, positions, columns, blocks of them, ranks' parts, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.estimate import is_estimate
from tensortrace.diff.extent import Extent
from tensortrace.diff.indices import described
from tensortrace.diff.logical import Merged
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.result import Along, Location
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

SHARE = 0.999
"""A place is where the difference lies if it holds this share of the squared difference at least."""

PART = 0.5
"""A place is told only if it is a smaller part of the tensor than this."""

MOST_ELEMENTS = 1 << 22
_PARAMETERS = frozenset(
    {
        Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD, Kind.OPTIMIZER_STATE,
        Kind.PARAM,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to cut a tensor: ``labels`` says to which of ``count`` groups each index of ``dim`` belongs.

    ``says`` puts the groups that hold the difference into words. Of ways that cut one dimension into
    the same kind of thing the one of the smallest place is told.
    """

    what: str
    dim: int
    labels: np.ndarray
    count: int
    says: Callable[[np.ndarray], str]

    @property
    def axis(self) -> tuple[int, bool]:
        """What the way cuts: rows and their positions are one dimension of what is put together."""
        return self.dim, self.what.startswith("positions")


@dataclass(frozen=True)
class _Found:
    way: Way
    groups: np.ndarray
    part: float


def localise(outcome: Outcome) -> Location | None:
    """Return the smallest simple place that holds nearly all of an origin's difference.

    None where it is spread over the tensor, or where only a block of the tensor is held.
    """
    loaded = outcome.assembled
    if loaded is None or outcome.window is not None or loaded.a.size > MOST_ELEMENTS or not loaded.a.ndim:
        return None
    if is_estimate(loaded.a) or is_estimate(loaded.b):
        return None  # a sketch says how much differs and not where
    squares = squared_difference(loaded.a, loaded.b)
    if not float(squares.sum()):
        return None
    found = [f for way in _ways(outcome, loaded) if (f := _smallest(squares, way)) is not None]
    best = [
        min((f for f in found if f.way.axis == axis), key=lambda f: round(f.part, 9))
        for axis in sorted({f.way.axis for f in found})
    ]
    if not best:
        return None
    kept = _kept(squares, best)
    along = tuple(
        Along(f.way.what, None if f.way.dim == 0 and loaded.owners else f.way.dim,
              tuple(int(g) for g in f.groups[:64]), len(f.groups), f.way.count)
        for f in best
    )  # fmt: skip
    text = "the difference lies in " + ", within them in ".join(f.way.says(f.groups) for f in best)
    return Location(text, float(kept), math.prod(f.part for f in best), along)


def squared_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the squared difference in float64; where only one run is not finite it is 1, and else 0."""
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    broken = ~same & ~(np.isfinite(left) & np.isfinite(right))
    if broken.any():
        return np.asarray(broken, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        delta = np.where(same, 0.0, right - left)
    greatest = float(np.abs(delta).max(initial=0.0))
    return np.asarray((delta / greatest) ** 2 if greatest else delta)


def _smallest(squares: np.ndarray, way: Way) -> _Found | None:
    """Return the fewest groups that hold the difference; None where they are half of the tensor or more."""
    axes = tuple(d for d in range(squares.ndim) if d != way.dim)
    known = way.labels >= 0
    sums = np.bincount(way.labels[known], squares.sum(axis=axes)[known], minlength=way.count)
    sizes = np.bincount(way.labels[known], minlength=way.count)
    order = np.argsort(-sums, kind="stable")
    held = np.cumsum(sums[order])
    enough = int(np.searchsorted(held, SHARE * float(squares.sum()))) + 1
    if enough > way.count:
        return None
    groups = np.sort(order[:enough])
    part = float(sizes[groups].sum() / len(way.labels))
    return _Found(way, groups, part) if part < PART else None


def _kept(squares: np.ndarray, found: Sequence[_Found]) -> float:
    """Return the share of the squared difference in all of the places at once."""
    inside = squares
    for dim, size in enumerate(squares.shape):
        wanted = np.ones(size, bool)
        for one in found:
            if one.way.dim == dim:
                wanted &= np.isin(one.way.labels, one.groups)
        inside = np.compress(wanted, inside, axis=dim)
    return float(inside.sum() / squares.sum())


def _ways(outcome: Outcome, loaded: Assembled) -> Iterator[Way]:
    """Yield how the tensor may be cut, for each dimension the way that says most about the program first."""
    entry = outcome.comparison
    items: Sequence[Item] = getattr(entry, "items_b", ())
    if loaded.owners:
        yield from _of_rows(loaded, outcome)
    yield from _of_shards(items, loaded)
    kind, name = outcome.node.slot.kind, outcome.node.slot.name
    for dim, size in enumerate(loaded.a.shape):
        if size > 1 and not (dim == 0 and loaded.owners):
            yield _plain(_called(dim, loaded, kind, name, outcome), dim, size)


def _plain(what: str, dim: int, size: int) -> Way:
    return Way(what, dim, np.arange(size), size, lambda groups: described(what, groups, size))


def _called(dim: int, loaded: Assembled, kind: Kind, name: str, outcome: Outcome) -> str:
    """Return what the indices of a dimension are called."""
    ndim = loaded.a.ndim
    if kind in _PARAMETERS and dim == 0 and ndim > 1:
        if _is_looked_up(name, outcome):
            return "vocabulary rows"
        return "experts" if "expert" in name and ndim == 3 else "rows"
    if dim == ndim - 1:
        return "columns" if ndim > 1 else "elements"
    return "rows" if dim == 0 else f"indices of dimension {dim}"


def _is_looked_up(parameter: str, outcome: Outcome) -> bool:
    """Tell whether the module that owns a parameter is given integers, so that rows are chosen by them."""
    view = outcome.pair.b if outcome.pair else None
    slots = view.named(Kind.ACTIVATION, parameter.rpartition(".")[0]) if view else ()
    given = (i for s in slots if view and s.slot.startswith("in") for i in view.items[s])
    return any(item.entry.dtype in ("int64", "int32") for item in given)


def _of_rows(loaded: Assembled, outcome: Outcome) -> Iterator[Way]:
    """Yield cuts of what is put together row by row: by rank, microbatch, padding, row, position."""
    owners, lengths = loaded.owners, np.asarray(loaded.lengths)
    of_row = np.repeat(np.arange(len(owners)), lengths)
    extents = outcome.pair.pairing.extents_b if outcome.pair else {}
    parts = (("rank", [row.part.rank for row in owners]), ("microbatch", [row.part.number for row in owners]))
    for what, keys in parts:
        numbers = sorted(set(keys))
        if len(numbers) > 1:
            labels = np.array([numbers.index(key) for key in keys])[of_row]
            yield Way(f"rows of {what}", 0, labels, len(numbers), _of_parts(what, numbers))
    padded = np.array([_is_padded(row, extents) for row in owners])
    if 0 < padded.sum() < len(owners):
        told = f"the {padded.sum()} of {len(owners)} rows that have padding in b"
        yield Way(
            "rows with padding",
            0,
            np.where(padded, 0, 1)[of_row],
            2,
            _either(told, "the rows without padding"),
        )
    if len(owners) > 1:
        yield Way("rows", 0, of_row, len(owners), _samples(owners))
    if lengths.max() > 1:
        position = np.concatenate([np.arange(n) for n in lengths])
        longest = int(lengths.max())
        yield Way("positions", 0, position, longest, lambda g: described("positions", g, longest))
        before_end = np.concatenate([np.arange(n)[::-1] for n in lengths])
        if len(set(loaded.lengths)) > 1:
            yield Way("positions from the end", 0, before_end, longest, _from_the_end)


def _is_padded(row: Row, extents: dict[Part, Extent]) -> bool:
    extent = extents.get(row.part)
    return extent is not None and bool(extent.positions) and row.stop - row.start < (extent.positions or 0)


def _of_parts(what: str, numbers: Sequence[int]) -> Callable[[np.ndarray], str]:
    def says(groups: np.ndarray) -> str:
        shown = ", ".join(str(numbers[g]) for g in groups[:8]) + (", …" if len(groups) > 8 else "")
        return f"the rows of {what} {shown} of b"

    return says


def _either(first: str, second: str) -> Callable[[np.ndarray], str]:
    return lambda groups: second if 1 in groups else first


def _samples(owners: Sequence[Row]) -> Callable[[np.ndarray], str]:
    def says(groups: np.ndarray) -> str:
        shown = [owners[g] for g in groups[:4]]
        places = (f"row {r.number} of rank {r.part.rank}, microbatch {r.part.number}" for r in shown)
        more = f", … ({len(groups)} in all)" if len(groups) > 4 else ""
        return f"{len(groups)} of {len(owners)} samples of b ({'; '.join(places)}{more})"

    return says


def _from_the_end(groups: np.ndarray) -> str:
    count = len(groups)
    if count == 1 and groups[0] == 0:
        return "the last valid position of each row"
    first = np.array_equal(groups, np.arange(count))
    return (
        f"the last {count} valid positions of each row"
        if first
        else described("positions from the end", groups, 0)
    )


def _of_shards(items: Sequence[Item], loaded: Assembled) -> Iterator[Way]:
    """Yield for each dimension that ranks share the cut into their parts."""
    source = items[0].source if items else None
    if not isinstance(source, Merged):
        return
    parts = [p for p in source.parts if not p.region.flat and not p.partial]
    first = 1 if loaded.owners else 0
    for dim in range(first, loaded.a.ndim):
        from_end = loaded.a.ndim - dim
        regions: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for part in parts:
            if from_end <= len(part.region.dims):
                regions.setdefault(tuple(part.region.dims[-from_end]), []).append(part.rank)
        if len(regions) > 1 and _cover(regions, loaded.a.shape[dim]):
            yield _shards(dim, regions, loaded.a.shape[dim])


def _cover(regions: Iterable[tuple[tuple[int, int], ...]], size: int) -> bool:
    return sorted(i for found in regions for a, b in found for i in range(a, b)) == list(range(size))


def _shards(dim: int, regions: dict[tuple[tuple[int, int], ...], list[int]], size: int) -> Way:
    labels = np.zeros(size, np.int64)
    for number, found in enumerate(regions):
        for start, stop in found:
            labels[start:stop] = number
    ranks = list(regions.values())

    def says(groups: np.ndarray) -> str:
        held = sorted({rank for g in groups for rank in ranks[g]})
        where = described("indices", np.flatnonzero(np.isin(labels, groups)), 0)
        return f"the shard of rank {', '.join(map(str, held))} ({where} of dimension {dim})"

    return Way("shards", dim, labels, len(regions), says)
