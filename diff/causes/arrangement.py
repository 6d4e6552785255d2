"""Right values in the wrong places: permuted, interleaved, transposed, shifted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.causes.case import CHANCE, Case, Proposal
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

_KINDS = frozenset(Kind) - {Kind.INPUT, Kind.SCHEDULE, Kind.LOSS}
MOST_SLICES = 2048
"""Slices of a dimension up to which each is looked for among all others: the work is their square."""

MOST_HEADS = 128
MOST_ELEMENTS = 1 << 22
"""Of larger tensors only an order of slices that are equal bit by bit is sought."""


def permuted(case: Case) -> Sequence[Proposal]:
    """Propose that slices along one dimension have changed places."""
    found = _pair(case)
    if found is None:
        return ()
    for dim in range(found[0].ndim):
        left, right = (np.moveaxis(x, dim, 0) for x in found)
        source = _sources(left, right, case.floor)
        if source is None:
            continue
        moved = np.flatnonzero(source != np.arange(len(source)))
        code, how = _kind_of(source)
        what = "rows" if dim == 0 else f"slices along {_called(dim, found[0].ndim)}"
        text = f"{what} of {case.origin.node.slot.name} are {how} in b: {_moves(moved, source[moved])}"
        number, words = float(len(moved)), f"{what} that moved"
        return (Proposal(code, text, [left[source]], [right], [left], number, words),)
    return ()


def _called(dim: int, ndim: int) -> str:
    return "the last dimension" if dim == ndim - 1 else f"dimension {dim}"


def _pair(case: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both tensors of an origin that has dimensions, None where there is nothing to arrange."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    if loaded is None or slot.kind not in _KINDS or slot.name == "(clip)" or not loaded.a.ndim:
        return None
    a, b = loaded.a, loaded.b
    if len(set(loaded.lengths)) == 1 and loaded.lengths[0] > 1:  # rows that were put one after the other
        a, b = (x.reshape(len(loaded.lengths), loaded.lengths[0], *x.shape[1:]) for x in (a, b))
    return (a, b) if np.isfinite(a).all() and np.isfinite(b).all() else None


def _sources(a: np.ndarray, b: np.ndarray, floor: float) -> np.ndarray | None:
    """Return which slice of ``a`` each slice of ``b`` is most like; None where that is no other order.

    Whether they are alike enough is for the test of the proposal to say. Among many short slices one that is
    as near as the ``floor`` is found by chance: such ones must be equal bit by bit.
    """
    count = len(a)
    if not 2 <= count <= MOST_SLICES or a.size == 0:
        return None
    x, y = a.reshape(count, -1), b.reshape(count, -1)
    wrong = np.flatnonzero([_apart(left, right) for left, right in zip(x, y, strict=True)])
    if len(wrong) < 2:
        return None
    nearest = _equal_slices(x[wrong], y[wrong])
    by_chance = len(wrong) * floor ** x.shape[1] > CHANCE
    if nearest is None and len(wrong) * x.shape[1] <= MOST_ELEMENTS and not by_chance:
        left, right = x[wrong].astype(np.float64), y[wrong].astype(np.float64)
        squares = np.sum(right**2, axis=1)[:, None] + np.sum(left**2, axis=1)[None, :]
        nearest = _one_to_one(squares - 2 * (right @ left.T))
    if nearest is None:
        return None
    source = np.arange(count)
    source[wrong] = wrong[nearest]
    return source if (source != np.arange(count)).any() else None


def _apart(x: np.ndarray, y: np.ndarray) -> bool:
    left = x.astype(np.float64)
    return bool(np.sum((left - y) ** 2) > 1e-6 * np.sum(left**2))


def _equal_slices(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """Return which slice of ``x`` each slice of ``y`` is, bit by bit; None where one is none of them."""
    where: dict[bytes, list[int]] = {}
    for number, piece in enumerate(x):
        where.setdefault(np.ascontiguousarray(piece).tobytes(), []).append(number)
    found = []
    for piece in y:
        waiting = where.get(np.ascontiguousarray(piece).tobytes())
        if not waiting:
            return None
        found.append(waiting.pop(0))
    return np.array(found)


def _one_to_one(distances: np.ndarray) -> np.ndarray | None:
    """Return the nearest column of each row, none taken twice; equal ones are given out in order."""
    taken: set[int] = set()
    found = []
    slack = 1e-12 * float(np.max(np.abs(distances)))
    for row in distances:
        candidates = np.flatnonzero(row <= row.min() + slack)
        free = next((int(c) for c in candidates if int(c) not in taken), None)
        if free is None:
            return None
        taken.add(free)
        found.append(free)
    return np.array(found)


def _kind_of(source: np.ndarray) -> tuple[str, str]:
    """Return the code and the word for an order: interleaved, shifted around, or else permuted."""
    width = _width_of_blocks(source)
    if width > 1:
        code, how = _kind_of(source[::width] // width)
        swapped = int(np.count_nonzero(source[::width] // width != np.arange(len(source) // width))) == 2
        if code == "layout.interleave" and not swapped:  # two blocks that changed places are the simpler word
            return code, f"{how} in blocks of {width}"
    count = len(source)
    for ways in range(2, count // 2 + 1):
        if count % ways:
            continue
        apart = np.arange(count).reshape(ways, -1).T.reshape(-1)
        together = np.arange(count).reshape(-1, ways).T.reshape(-1)
        if np.array_equal(source, apart):
            return "layout.interleave", f"interleaved {ways} ways"
        if np.array_equal(source, together):
            return "layout.interleave", f"taken apart {count // ways} ways instead of interleaved"
    shift = int(source[0])
    halves = count == 2 * shift  # blocks that changed places rather than a shift
    if shift and not halves and np.array_equal(source, np.roll(np.arange(count), -shift)):
        by = -shift if shift <= count // 2 else count - shift
        return "layout.shifted", f"shifted by {by:+d} around the end"
    return "layout.permuted_blocks", "permuted"


def _width_of_blocks(source: np.ndarray) -> int:
    """Return the greatest size of equal blocks that moved as wholes."""
    count = len(source)
    for width in range(count // 2, 1, -1):
        if count % width == 0:
            blocks = source.reshape(-1, width)
            if not (blocks[:, 0] % width).any() and bool(np.all(np.diff(blocks, axis=1) == 1)):
                return width
    return 1


def _moves(rows: np.ndarray, source: np.ndarray) -> str:
    """Tell runs of slices that moved together."""
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(source) != 1)) + 1
    runs = list(zip(np.split(rows, breaks), np.split(source, breaks), strict=True))
    parts = [f"{_range(to)} hold a's {_range(origin)}" for to, origin in runs[:4]]
    return "; ".join(parts) + ("; …" if len(runs) > 4 else "")


def _range(numbers: np.ndarray) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def transposed(case: Case) -> Iterator[Proposal]:
    """Propose that two dimensions changed places, or that one was read in the order of another."""
    found = _pair(case)
    if found is None or found[0].size > MOST_ELEMENTS:
        return
    a, b = found
    for mistaken, text in _transposes(a):
        if mistaken.shape == b.shape:
            text = f"{case.origin.node.slot.name}: {text}"
            yield Proposal("layout.transposed", text, [mistaken], [b], [a])


def _transposes(a: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    if a.ndim >= 2:
        turned = np.swapaxes(a, -1, -2)
        if a.shape[-1] == a.shape[-2]:
            yield turned, "the last two dimensions have changed places in b"
        else:
            yield turned.reshape(a.shape), "b is a transposed and then read in a's shape"
            back = a.reshape(*a.shape[:-2], a.shape[-1], a.shape[-2])
            yield np.swapaxes(back, -1, -2).reshape(a.shape), "b is a read in its transposed shape"
    if a.ndim < 3:
        return
    *_, positions, width = a.shape
    for heads in range(2, min(width, MOST_HEADS) + 1):
        if width % heads == 0:
            parts = a.reshape(-1, positions, heads, width // heads)
            unmerged = np.swapaxes(parts, 1, 2).reshape(a.shape)
            yield unmerged, f"{heads} heads were flattened without moving them behind the positions"


def shifted(case: Case) -> Iterator[Proposal]:
    """Propose that everything moved along one dimension, and zeros or the edge moved in."""
    found = _pair(case)
    if found is None or case.origin.node.slot.kind == Kind.PARAM or found[0].size > MOST_ELEMENTS:
        return
    a, b = found
    name = case.origin.node.slot.name
    for dim in range(a.ndim):
        left, right = np.moveaxis(a, dim, 0), np.moveaxis(b, dim, 0)
        for by in (n for n in (1, -1, 2, -2) if abs(n) * 2 < len(left)):
            for mistaken, edge in _moved(left, by):
                text = f"{name} is shifted by {by:+d} along {_called(dim, a.ndim)}, {edge} moved in"
                yield Proposal(
                    "layout.shifted", text, [mistaken], [right], [left], float(by), "places", simplicity=-1
                )  # fmt: skip


def _moved(a: np.ndarray, by: int) -> Iterator[tuple[np.ndarray, str]]:
    kept = a[:-by] if by > 0 else a[-by:]
    for edge, words in ((np.zeros_like(a[:1]), "zeros"), (a[:1] if by > 0 else a[-1:], "the edge")):
        filled = [edge] * abs(by)
        yield np.concatenate([*filled, kept] if by > 0 else [kept, *filled]), words


def positions(case: Case) -> Sequence[Proposal]:
    """Propose that position numbers start elsewhere: for all rows, for some, or for a rank's part of them."""
    loaded, slot = case.origin.assembled, case.origin.node.slot
    if loaded is None or not loaded.exact or not slot.slot.startswith("in."):
        return ()
    if slot.kind not in (Kind.ACTIVATION, Kind.INPUT) or loaded.a.shape != loaded.b.shape:
        return ()
    left, right = _by_row(loaded, loaded.a), _by_row(loaded, loaded.b)
    if max(map(len, left), default=0) < 2 or not all(map(_counts_up, left)):
        return ()
    apart = [y - x for x, y in zip(left, right, strict=True)]
    shared = all(np.array_equal(shift, apart[0]) for shift in apart)
    runs = _by_rank(apart, loaded.owners) or (_by_range(apart[0]) if shared else [])
    flat = np.concatenate(apart)
    if not flat.any() or not runs:
        return ()
    text = f"the positions given to {slot.name} are shifted: {'; '.join(list(dict.fromkeys(runs))[:6])}"
    number = float(flat[np.argmax(np.abs(flat))])
    a, b = np.concatenate(left), np.concatenate(right)
    return (Proposal("position.shifted", text, [a + flat], [b], [a], number, "positions", simplicity=-1),)


def _by_row(loaded: Assembled, values: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each row, or of each part; rows of unequal length stand one after the other."""
    whole = values.astype(np.float64)
    if whole.ndim == 1 and len(loaded.lengths) > 1 and sum(loaded.lengths) == len(whole):
        return np.split(whole, np.cumsum(loaded.lengths)[:-1])
    return list(whole.reshape(-1, whole.shape[-1])) if whole.ndim else []


def _by_rank(apart: Sequence[np.ndarray], owners: Sequence[Row]) -> list[str]:
    """Say by how much each rank's positions are shifted, where each row or part has a shift of its own."""
    if len(owners) != len(apart) or not all(len(shift) and np.ptp(shift) == 0 for shift in apart):
        return []
    told = zip(owners, apart, strict=True)
    return [f"on rank {y.part.rank} by {shift[0]:+g}" for y, shift in told if shift[0]]


def _by_range(apart: np.ndarray) -> list[str]:
    """Say by how much which positions are shifted; nothing where as many shifts as positions would."""
    starts = np.flatnonzero(np.diff(apart)) + 1
    if 4 * (len(starts) + 1) > len(apart) + 4:
        return []
    return [f"{_range(run)} by {apart[run[0]]:+g}" for run in np.split(np.arange(len(apart)), starts)]


def _counts_up(row: np.ndarray) -> bool:
    """Tell whether a row counts positions."""
    return bool(np.all(np.diff(row) == 1))
