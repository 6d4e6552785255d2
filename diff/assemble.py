"""Global tensors from the parts that ranks and microbatches recorded, in one order for both runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.dimensions import Label, has_rows, one_position_fewer, read_dims
from tensortrace.diff.extent import Extent
from tensortrace.diff.grouped import of_groups
from tensortrace.diff.orders import distance, readings
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row


class NotComparable(Exception):
    """Two sides of a boundary that no alignment brings to one order; the text says why."""


class Assembled(NamedTuple):
    """Both global tensors in one order, and the ranks of ``b`` (of ``a``) that each element came from.

    ``owners`` names, per index of the first dimension, the row of ``b``; empty where rows do not apply.
    ``guessed``: that entries follow the rows was read from nothing but their number.
    """

    a: np.ndarray
    b: np.ndarray
    owners: tuple[Row, ...] = ()
    lengths: tuple[int, ...] = ()
    guessed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``a``."""
        return self.a.shape

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans."""
        return self.a.dtype.kind in "iub"

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield both sides, which are one block."""
        yield self.a, self.b

    def owner(self, index: tuple[int, ...]) -> Row | None:
        """Return the row of ``b`` that holds the element, None where rows do not apply."""
        if not self.owners or not index:
            return None
        ends = np.cumsum(self.lengths)
        found = int(np.searchsorted(ends, index[0], side="right"))
        return self.owners[min(found, len(self.owners) - 1)]


def by_rows(
    a: Sequence[Item],
    b: Sequence[Item],
    pairing: Pairing,
    *,
    scale_b: Callable[[Row], float] | None = None,
    additive: bool = False,
    row_bound: bool = False,
) -> Assembled:
    """Bring a row-aligned boundary of both runs to a's row order, padding cut away.

    ``scale_b`` divides each row of ``b`` (gradient scale accounting). ``additive`` says that what does not
    depend on rows is summed over parts (a gradient) instead of being equal in all of them. ``row_bound``: see
    ``label_dims``.

    Raises NotComparable where parts are missing or the dimensions cannot be read.
    """
    of_a, of_b = _by_part(a), _by_part(b)
    load = partial(_in_order, scale_b=scale_b, additive=additive, row_bound=row_bound)
    first, *others = readings(of_a, of_b, pairing)
    others += list(readings(of_a, of_b, one_position_fewer(pairing)))[1:]
    problem: NotComparable | None = None
    found: Assembled | None = None
    try:
        found = load(*first)
    except NotComparable as error:
        problem = error
    if found and (not others or not found.owners or distance(found.a, found.b) < _ALIKE):
        return found  # another order is sought only where this one tells of other values
    near = _FAR_NEARER * distance(found.a, found.b) if found else math.inf
    for reading in others:
        with suppress(NotComparable):
            other = load(*reading)
            apart = distance(other.a, other.b) if other.owners else math.inf
            if apart < near or (found is None and other.owners):
                found, near = other, apart
    if found is None:
        assert problem is not None
        raise problem
    return found


_ALIKE, _FAR_NEARER = 1e-2, 0.1
"""Relative differences from which another order of rows and positions is tried, and which decide for it."""


def _in_order(
    of_a: dict[Part, Item],
    of_b: dict[Part, Item],
    pairing: Pairing,
    *,
    scale_b: Callable[[Row], float] | None,
    additive: bool,
    row_bound: bool,
) -> Assembled:
    """Return both sides in a's row order, where rows come before positions in both."""
    given, (labels, pairing) = pairing, read_dims(of_a, of_b, pairing, row_bound=row_bound)
    if labels is None:
        found = of_groups(of_a, of_b, pairing, scale_b)
        if found is not None:
            return Assembled(*found)
        forms_a, forms_b = ({len(i.entry.local_shape) for i in of.values()} for of in (of_a, of_b))
        if forms_a == forms_b and len(forms_a) > 1:
            load = partial(_in_order, scale_b=scale_b, additive=additive, row_bound=row_bound)
            return _by_form(of_a, of_b, given, load)
        shapes = sorted({i.entry.local_shape for i in (*of_a.values(), *of_b.values())})
        raise NotComparable(f"local shapes {shapes} do not follow the batch's rows and positions")
    pairs = [p for p in pairing.pairs if p[0].part in of_a and p[1].part in of_b]
    if labels[:1] == ("grouped",):  # sizes cannot tell the two orders apart: the values can
        orders = (labels, ("stacked", *labels[1:]))
        stacks = [_stack_rows(of_a, of_b, o, pairs, pairing, scale_b) for o in orders]
        return min(stacks, key=lambda s: distance(s.a, s.b))._replace(guessed=not row_bound)
    if has_rows(labels):
        flat = labels[0] == "flat" and not row_bound
        stacked = _stack_rows(of_a, of_b, labels, pairs, pairing, scale_b)._replace(guessed=flat)
        if given.of_answers() is None:
            return stacked
        own = {(y.part, y.number): y for _, y in given.pairs}  # an entry's owner is padded as its source is
        return stacked._replace(owners=tuple(own[y.part, y.number] for y in stacked.owners))
    shared = _shared(of_a, of_b, labels, pairs, scale_b, additive)
    if not additive and not distance(shared.a, shared.b) < _ALIKE:  # or rows of another order make them
        grouped = of_groups(of_a, of_b, pairing, scale_b)
        if grouped and distance(*grouped[:2]) < _FAR_NEARER * distance(shared.a, shared.b):
            return Assembled(*grouped)
    return shared


def _by_form(
    of_a: dict[Part, Item],
    of_b: dict[Part, Item],
    pairing: Pairing,
    load: Callable[[dict[Part, Item], dict[Part, Item], Pairing], Assembled],
) -> Assembled:
    """Return both sides of passes that give tensors of other numbers of dimensions, form by form, flattened.

    One model may be asked for actions in some passes without gradients, for their probabilities in others.
    """
    found: list[Assembled] = []
    for dims in sorted({len(i.entry.local_shape) for i in (*of_a.values(), *of_b.values())}):
        a, b = ({p: i for p, i in s.items() if len(i.entry.local_shape) == dims} for s in (of_a, of_b))
        found.append(load(a, b, pairing))
    if not all(one.owners for one in found):
        raise NotComparable("its passes give tensors of several forms, some of which belong to no row")
    sizes = [int(np.prod(one.a.shape[1:])) for one in found]
    return Assembled(
        np.concatenate([np.ravel(one.a) for one in found]),
        np.concatenate([np.ravel(one.b) for one in found]),
        tuple(owner for one in found for owner in one.owners),
        tuple(n * size for one, size in zip(found, sizes, strict=True) for n in one.lengths),
    )


def _by_part(items: Sequence[Item]) -> dict[Part, Item]:
    return {item.part: item for item in items if item.part is not None}


def _read(
    of_a: dict[Part, Item], of_b: dict[Part, Item]
) -> tuple[dict[Part, np.ndarray], dict[Part, np.ndarray]]:
    """Return the tensors of both runs; of equal digests one is read, which stands for both."""
    values_a = {part: item.read() for part, item in of_a.items()}
    known = {_content(item): values_a[part] for part, item in of_a.items() if not item.bare}
    values_b = {}
    for part, item in of_b.items():
        value = known.get(_content(item)) if not item.bare else None
        values_b[part] = item.read() if value is None else value
    return values_a, values_b


def _content(item: Item) -> tuple[str, tuple[int, ...], str]:
    return item.entry.dtype, item.entry.local_shape, item.entry.digest


def _stack_rows(
    of_a: dict[Part, Item],
    of_b: dict[Part, Item],
    labels: tuple[Label, ...],
    pairs: Sequence[tuple[Row, Row]],
    pairing: Pairing,
    scale_b: Callable[[Row], float] | None,
) -> Assembled:
    if not pairs:
        raise NotComparable("no row of one run is a row of the other")
    if not {"positions", "flat"} & set(labels) and any(x.packed or y.packed for x, y in pairs):
        pairs = _whole_rows(pairs)
    values_a, values_b = _read(of_a, of_b)
    by_position = sum(label in ("positions", "others", "flat") for label in labels)
    whole = by_position == 1 and scale_b is None
    left: list[np.ndarray] = []
    right: list[np.ndarray] = []
    for x, y in map(_with_as_many_others, pairs):
        lengths_of = x.stop - x.start, y.stop - y.start  # differ only where rows were paired by order
        if whole and lengths_of[0] != lengths_of[1] and _are_numbers_of_things(values_a, values_b):
            one = _piece(values_a[x.part], labels, x, pairing.extents_a[x.part], lengths_of[0])
            other = _piece(values_b[y.part], labels, y, pairing.extents_b[y.part], lengths_of[1])
            left.append(_with_nothing(one, max(lengths_of)))
            right.append(_with_nothing(other, max(lengths_of)))
            continue
        stop = min(lengths_of)
        left.append(_piece(values_a[x.part], labels, x, pairing.extents_a[x.part], stop))
        piece = _piece(values_b[y.part], labels, y, pairing.extents_b[y.part], stop)
        scale = scale_b(y) if scale_b else 1.0
        right.append(piece / scale if scale != 1.0 else piece)
    owners = tuple(y for _, y in pairs)
    if by_position > 1:
        left, right = [np.ravel(v) for v in left], [np.ravel(v) for v in right]
    lengths = tuple(len(v) for v in left)
    return Assembled(_joined(left), _joined(right), owners, lengths)


def _joined(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other: where they lie so in memory, as a view of it."""
    first = pieces[0]
    if type(first) is not np.ndarray:
        return np.concatenate(pieces)
    end = first.ctypes.data
    for piece in pieces:
        adjoins = (
            type(piece) is np.ndarray and piece.base is first.base is not None and piece.ctypes.data == end
        )
        alike = piece.dtype == first.dtype and piece.shape[1:] == first.shape[1:]
        if not (adjoins and alike and piece.ndim and piece.flags.c_contiguous):
            return np.concatenate(pieces)
        end += piece.nbytes
    shape = (sum(len(piece) for piece in pieces), *first.shape[1:])
    return np.lib.stride_tricks.as_strided(first, shape, first.strides)


def _with_as_many_others(rows: tuple[Row, Row]) -> tuple[Row, Row]:
    """Return two rows whose other sequences are of one length: unlike where rows were paired by order."""
    length = min(row.answer[1] - row.answer[0] for row in rows)
    x, y = (row._replace(answer=(row.answer[0], row.answer[0] + length)) for row in rows)
    return x, y


def _are_numbers_of_things(*sides: dict[Part, np.ndarray]) -> bool:
    return all(value.dtype.kind in "iu" for side in sides for value in side.values())


def _with_nothing(piece: np.ndarray, length: int) -> np.ndarray:
    """Return a row with -1 at the positions that it has not and its counterpart has: a row that was cut."""
    if len(piece) == length:
        return piece.astype(np.int64)
    missing = np.full((length - len(piece), *piece.shape[1:]), -1, dtype=np.int64)
    return np.concatenate([piece.astype(np.int64), missing])


def _whole_rows(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """Return each row once in which documents are packed, where both runs pack the same rows alike."""
    found: dict[tuple[Part, int], list[tuple[Row, Row]]] = {}
    for x, y in pairs:
        found.setdefault((x.part, x.number), []).append((x, y))
    others = {(y.part, y.number) for _, y in pairs}
    alike = all(
        len({(y.part, y.number) for _, y in row}) == 1 and all(x.start == y.start for x, y in row)
        for row in found.values()
    )
    if not alike or len(others) != len(found):
        raise NotComparable("it has one entry for a row in which several documents are packed")
    return [row[0] for row in found.values()]


def _piece(
    values: np.ndarray, labels: tuple[Label, ...], row: Row, extent: Extent, length: int
) -> np.ndarray:
    """Return one row's valid part; its first dimension is the positions, or 1 where there are none."""
    picks: list[slice] = []
    for label in labels:
        if label == "rows":
            picks.append(slice(row.number, row.number + 1))
        elif label == "positions":
            picks.append(slice(row.start, row.start + length))
        elif label == "others":
            picks.append(slice(*row.answer))
        elif label == "flat" and extent.time_major:
            first = row.number + row.start * extent.rows
            picks.append(slice(first, first + (length - 1) * extent.rows + 1, extent.rows))
        elif label == "flat":
            first = row.number * (extent.positions or 1) + row.start
            picks.append(slice(first, first + length))
        elif label == "grouped":
            size = values.shape[0] // extent.rows
            picks.append(slice(row.number * size, (row.number + 1) * size))
        elif label == "stacked":
            picks.append(slice(row.number, None, extent.rows))
        else:
            picks.append(slice(None))
    piece = values[tuple(picks)]
    if "rows" in labels and "positions" in labels:
        rows, positions = labels.index("rows"), labels.index("positions")
        piece = np.moveaxis(np.squeeze(piece, axis=rows), positions - (rows < positions), 0)
    elif "rows" in labels:
        piece = np.moveaxis(piece, labels.index("rows"), 0)
    return piece


def _shared(
    of_a: dict[Part, Item],
    of_b: dict[Part, Item],
    labels: tuple[Label, ...],
    pairs: Sequence[tuple[Row, Row]],
    scale_b: Callable[[Row], float] | None,
    additive: bool,
) -> Assembled:
    """Compare what has no row dimension: equal in all parts, summed over them, or part by part."""
    scales = {y.part: scale_b(y) for _, y in pairs} if scale_b else {}
    values_a, values_b = _read(of_a, of_b)
    values_b = {p: value / scales.get(p, 1.0) for p, value in values_b.items()}
    if additive:
        return Assembled(
            *_crop(labels, _padded_sum(list(values_a.values())), _padded_sum(list(values_b.values())))
        )
    if _all_equal(labels, values_a) and _all_equal(labels, values_b):
        return Assembled(*_crop(labels, _shortest(values_a), _shortest(values_b)))
    partners = {x.part: y.part for x, y in pairs}
    if len(set(partners.values())) == len(partners) == len(values_a) == len(values_b):
        left = [np.ravel(values_a[p]) for p in partners]
        right = [np.ravel(values_b[q]) for q in partners.values()]
        if all(len(x) == len(y) for x, y in zip(left, right, strict=True)):
            return Assembled(np.concatenate(left), np.concatenate(right))
    if not labels and (found := _of_all_rows(values_a, values_b, pairs)):
        return found
    if "positions" in labels and _one_is_as_all(labels, values_a, values_b):
        found = one_for_all(tuple(of_a.values()), tuple(of_b.values()))
        if found is not None:
            return found
    raise NotComparable("no dimension follows the rows, values differ between parts, and the splits differ")


def _one_is_as_all(
    labels: tuple[Label, ...], values_a: dict[Part, np.ndarray], values_b: dict[Part, np.ndarray]
) -> bool:
    """Tell whether one run has the same in all parts, and some parts of the other run have it too.

    Then it follows the positions and not the rows, and the parts that have something else are wrong.
    """
    for alike, others in ((values_a, values_b), (values_b, values_a)):
        if _all_equal(labels, alike):
            same = _shortest(alike)
            return any(_all_equal(labels, {_key(0): same, _key(1): value}) for value in others.values())
    return False


_NEAR = 1e-2
"""Relative difference up to which two numbers are taken for the same statistic of the same rows."""


def _of_all_rows(
    values_a: dict[Part, np.ndarray], values_b: dict[Part, np.ndarray], pairs: Sequence[tuple[Row, Row]]
) -> Assembled | None:
    """Compare numbers that parts computed of their rows as what they would be of all rows at once.

    As a sum, or as a mean over rows or over positions, whichever comes nearest; None where none comes near:
    then it is no such number (a maximum, a product of means), and other splits have others.
    """
    found = []
    ways: tuple[Callable[[Row], float], ...] = (
        lambda row: 0.0, lambda row: 1.0, lambda row: float(row.stop - row.start)
    )  # fmt: skip
    for weighing in ways:
        sides = []
        for side, values in enumerate((values_a, values_b)):
            weight = dict.fromkeys(values, 0.0)
            for pair in pairs:
                if pair[side].part in weight:
                    weight[pair[side].part] += weighing(pair[side])
            total = sum(weight.values())
            shares = {part: w / total if total else 1.0 for part, w in weight.items()}
            sides.append(float(sum(share * float(values[part]) for part, share in shares.items())))
        apart = abs(sides[0] - sides[1])
        found.append((apart / (max(map(abs, sides)) or 1.0), sides))
    distance, (left, right) = min(found, key=lambda f: f[0] if math.isfinite(f[0]) else math.inf)
    return Assembled(np.asarray(left), np.asarray(right)) if distance < _NEAR else None


def same_everywhere(items: Sequence[Item]) -> bool:
    """Tell whether all parts hold the same, as far as the shortest of them reaches."""
    if len({item.entry.digest for item in items}) == 1:
        return True
    if len({len(item.entry.local_shape) for item in items}) != 1:
        return False
    return _all_equal((), {_key(n): item.read() for n, item in enumerate(items)})


def _key(number: int) -> Part:
    return Part(number, "", 0)


def one_for_all(a: Sequence[Item], b: Sequence[Item]) -> Assembled | None:
    """Return each part of one run against the value that all parts of the other have; None if neither has."""
    of_a, of_b = _by_part(a), _by_part(b)
    if not of_a or not of_b or len({len(i.entry.local_shape) for i in (*a, *b)}) != 1:
        return None
    values_a, values_b = ({part: item.read() for part, item in side.items()} for side in (of_a, of_b))
    if _all_equal((), values_a):
        pairs = [(part, _shortest(values_a), value) for part, value in values_b.items()]
    elif _all_equal((), values_b):
        pairs = [(part, value, _shortest(values_b)) for part, value in values_a.items()]
    else:
        return None
    cropped = [_crop((), np.atleast_1d(x), np.atleast_1d(y)) for _, x, y in pairs]
    if len({x.shape for x, _ in cropped}) == 1:
        cropped = [(x[None], y[None]) for x, y in cropped]  # one entry for each part
    elif len({x.shape[1:] for x, _ in cropped}) > 1:
        cropped = [(x.ravel(), y.ravel()) for x, y in cropped]
    left, right = zip(*cropped, strict=True)
    owners = tuple(Row(part, 0, 0, 0, b"") for part, _, _ in pairs)
    lengths = tuple(len(value) for value in right)
    return Assembled(np.concatenate(left), np.concatenate(right), owners, lengths)


def _padded_sum(values: Sequence[np.ndarray]) -> np.ndarray:
    shape = tuple(max(sizes) for sizes in zip(*(v.shape for v in values), strict=True))
    total = np.zeros(shape, dtype=np.float64)
    for value in values:
        total[tuple(slice(0, size) for size in value.shape)] += value
    return total


def _crop(labels: tuple[Label, ...], a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    window = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    return a[window], b[window]


def _shortest(values: dict[Part, np.ndarray]) -> np.ndarray:
    return min(values.values(), key=lambda v: v.size)


def _all_equal(labels: tuple[Label, ...], values: dict[Part, np.ndarray]) -> bool:
    reference = _shortest(values)
    window = tuple(slice(0, size) for size in reference.shape)
    return all(np.array_equal(v[window], reference, equal_nan=v.dtype.kind == "f") for v in values.values())
