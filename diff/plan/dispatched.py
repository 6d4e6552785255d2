"""Compares tensors of modules that see chosen tokens of the batch: experts, and what is inside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable, same_everywhere
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.dispatch import CLOSE, Matching, match_rows
from tensortrace.diff.orders import distance
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.rows import Batch, Row
from tensortrace.tracer.types import Kind

Side = dict[Part, Item]

_MOST_ROWS = 1 << 17
"""Rows among which another expert's tokens are sought."""

_NEARER = 0.1
"""How much better values must agree for tokens in any order to be meant."""


def by_dispatch(
    slot: Slot,
    a: Sequence[Item],
    b: Sequence[Item],
    pair: StepPair,
    scale_b: Callable[[Row], float] | None = None,
) -> Assembled | None:
    """Return both sides with matching rows, where the rows of a module's own input tell which they are.

    Of tokens with equal inputs the gradients at the call's output tell which is which. Rows without a
    counterpart are left out, as far as they may be padding: that is routed like any token, and there is more
    of it where rows are padded further. So are rows to whose output no gradient flows: they do nothing.
    None where no input of the module, or of one around it, has as many rows.

    Raises NotComparable where more rows are without counterpart than there is padding, or where the rows'
    gradients have different factors.
    """
    side_a, side_b = _by_part(a), _by_part(b)
    if not _same_rows(side_a, side_b):
        return None
    given = next(_given_to(slot, side_a, side_b, pair), None)
    if given is None:
        return None
    left, right = _stacked(side_a), _stacked(side_b)
    told_by = None
    if slot.kind == Kind.ACTIVATION_GRAD:
        told_by = _gradients_at_output(given, pair) or (left, right)
    matching = match_rows(_stacked(given.a), _stacked(given.b), told_by)
    try:
        _check(slot, matching, given, pair)
    except NotComparable:
        count = min(len(left), len(right))
        if slot != given.slot or not count or not others_tokens(given, pair):
            raise
        return Assembled(left[:count], right[:count])
    left, right = left[matching.rows_a], right[matching.rows_b]
    return Assembled(left, right / _one_scale(pair, scale_b) if scale_b else right)


def taken_by_others(slot: Slot, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> bool:
    """Tell whether other modules take the tensor that a module was given in one run than in the other.

    An expert is given tokens chosen for it, or all of them, as every other expert is: then the gradient of
    what it was given is not its own.
    """
    rows = [[item.entry.local_shape[:1] for item in side] for side in (a, b)]
    whole = [_is_all(a, pair.batch_a), _is_all(b, pair.batch_b)]
    if sorted(rows[0]) == sorted(rows[1]) or whole[0] == whole[1]:
        return False
    return _takers(slot, pair.a) != _takers(slot, pair.b)


def _is_all(items: Sequence[Item], batch: Batch) -> bool:
    """Tell whether tensors have a row for each token of their part of the batch."""
    known = [(item.entry.local_shape[:1], batch.extents.get(item.part)) for item in items if item.part]
    return bool(known) and all(e and shape == (e.rows * (e.positions or 1),) for shape, e in known)


def _takers(slot: Slot, view: StepView) -> set[str]:
    """Return the modules that are given the very tensor that a module was given."""
    given = view.items.get(slot._replace(kind=Kind.ACTIVATION), ())
    held = {(item.part, item.entry.digest) for item in given if math.prod(item.entry.local_shape)}
    return {
        other.name
        for other, items in view.find(Kind.ACTIVATION, phase=slot.phase)
        if other.slot.startswith("in") and any((i.part, i.entry.digest) in held for i in items)
    }


def of_chosen(
    slot: Slot,
    a: Sequence[Item],
    b: Sequence[Item],
    pair: StepPair,
    scale_b: Callable[[Row], float] | None,
    aligned: Assembled,
) -> Assembled | None:
    """Return both sides as ``by_dispatch`` does where ``aligned`` took chosen tokens for something else.

    Any number of tokens may be chosen: by chance as many as the batch has rows, positions or groups of rows,
    or as many in both runs. Sizes say nothing of those, and order is no difference. None of others, and where
    the values agree no better.
    """
    if slot.phase != "train" or not (
        _is_expert(slot) or all(len(i.entry.local_shape) == 2 for i in (*a, *b))
    ):
        return None
    apart = distance(aligned.a, aligned.b)
    if apart <= CLOSE**2 or not _are_chosen(slot, a, b, pair):
        return None
    try:
        found = by_dispatch(slot, a, b, pair, scale_b)
    except NotComparable:
        return None
    return found if found and distance(found.a, found.b) < _NEARER * apart else None


def _are_chosen(slot: Slot, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> bool:
    """Tell whether a module is given tokens of the batch: it is an expert, or what it is given shows it.

    One token of each row, in the rows' order, is no such choice: whatever token it is, it stands for its row.
    """
    given = next(_given_to(slot, _by_part(a), _by_part(b), pair), None)
    if given is None:
        return _is_expert(slot)
    sides = ((given.a, pair.a, pair.batch_a), (given.b, pair.b, pair.batch_b))
    found = [_taken(item, view, batch) for side, view, batch in sides for item in side.values()]
    if found and all(taken == "one of each row" for taken in found):
        return False
    return _is_expert(slot) or None not in found


def _is_expert(slot: Slot) -> bool:
    return "expert" in slot.name.lower()


def _taken(item: Item, view: StepView, batch: Batch) -> Literal["one of each row", "tokens", None]:
    """Tell which tokens of what it was computed from a tensor has; None where it has others, or all."""
    rows = item.read()
    tokens = batch.extents[item.part] if item.part in batch.extents else None
    if tokens is None or rows.ndim != 2 or len(rows) >= tokens.rows * (tokens.positions or 1):
        return None
    for slot, part in view.producers(item):
        for source in (i for i in view.items.get(slot, ()) if i.part == part and i.source.stored(i.entry)):
            shape = source.entry.local_shape
            if shape[-1:] == rows.shape[1:] and len(shape) > 1 and math.prod(shape[:-1]) > len(rows):
                given = source.read()
                if len(rows) == tokens.rows == shape[0]:
                    own = (given.reshape(len(rows), -1, shape[-1]) == rows[:, None]).all(axis=-1)
                    if own.any(axis=1).all():
                        return "one of each row"
                known = {row.tobytes() for row in given.reshape(-1, shape[-1])}
                if all(row.tobytes() in known for row in rows):
                    return "tokens"
    return None


class Given(NamedTuple):
    """What a module was given in both runs, and as what: it has a row for each token."""

    slot: Slot
    a: Side
    b: Side


def _check(slot: Slot, matching: Matching, given: Given, pair: StepPair) -> None:
    """Raise NotComparable where more rows have no counterpart than may be."""
    if matching.only_a and matching.only_b and not len(matching.rows_a):
        raise NotComparable(f"no row that {slot.name} was given in one run was given to it in the other")
    sides = (
        ("a", pair.a, pair.batch_a, given.a, matching.rows_a, matching.only_a),
        ("b", pair.b, pair.batch_b, given.b, matching.rows_b, matching.only_b),
    )
    for name, view, batch, side, rows, left in sides:
        padding = _padding(batch)
        if left > padding and (idle := _idle(given.slot, side, view)) is not None:
            others = int(np.count_nonzero(idle[np.setdiff1d(np.arange(len(idle)), rows)]))
            left, padding = left - others, max(padding - others, 0)  # no gradient flows to padding either
        if left > padding:
            more = f"{left} have no counterpart, and {padding} tokens are padding"
            raise NotComparable(f"of the rows that {slot.name} was given in {name} {more}")
        if left and (count := _tokens_left(given.slot, side, view, batch, rows)):
            more = f"{count} have no counterpart, and are no padding"
            raise NotComparable(f"of the rows that {slot.name} was given in {name} {more}")


def _tokens_left(slot: Slot, side: Side, view: StepView, batch: Batch, matched: np.ndarray) -> int:
    """Count the rows without counterpart that are tokens of the batch for certain, and have an effect."""
    idle = _idle(slot, side, view)
    missing = np.ones(sum(map(_rows, side.values())), dtype=bool)
    missing[matched] = False
    missing &= True if idle is None else ~idle
    if not missing.any():
        return 0
    return int(
        np.count_nonzero(missing & np.concatenate([_valid(side[p], view, batch) for p in sorted(side)]))
    )


def _valid(item: Item, view: StepView, batch: Batch) -> np.ndarray:
    """Return which rows of a tensor are tokens at valid positions, and equal to none that is padding.

    Of none it is said where the tokens that they were taken from were not recorded row by row.
    """
    extent, rows = batch.extents.get(item.part) if item.part else None, item.read()
    if extent is None or extent.positions is None or extent.time_major:
        return np.zeros(len(rows), dtype=bool)
    counts = np.zeros((extent.rows, extent.positions), dtype=bool)
    for row in batch.rows:
        if row.part == item.part and not row.idle:
            counts[row.number, row.start : row.stop] = True
    found = np.zeros(len(rows), dtype=bool)
    for slot, part in view.producers(item):
        for source in (i for i in view.items.get(slot, ()) if i.part == part and i.source.stored(i.entry)):
            tokens = source.read()
            if tokens.shape[-1:] == rows.shape[1:] and tokens.size == counts.size * rows.shape[-1]:
                tokens, valid = tokens.reshape(counts.size, -1), counts.ravel()
                known, padding = ({row.tobytes() for row in tokens[of]} for of in (valid, ~valid))
                found |= [row.tobytes() in known and row.tobytes() not in padding for row in rows]
    return found


def whose_tokens(slot: Slot, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> str:
    """Return the expert of ``a`` whose tokens an expert of ``b`` was given, "" where it was given its own."""
    given = next(_given_to(slot, _by_part(a), _by_part(b), pair), None)
    return others_tokens(given, pair) if given is not None and given.slot == slot else ""


def others_tokens(given: Given, pair: StepPair) -> str:
    """Return the expert of ``a`` that was given the tokens which this one has in ``b``, "" where none."""
    own = match_rows(_stacked(given.a), _stacked(given.b))
    mine, wanted = given.slot.name.split("."), _stacked(given.b)
    looked_at = 0
    for slot, items in pair.a.find(Kind.ACTIVATION, phase=given.slot.phase):
        theirs = slot.name.split(".")
        if slot == given.slot or slot != given.slot._replace(name=slot.name) or len(mine) != len(theirs):
            continue
        apart = [pair_of for pair_of in zip(mine, theirs, strict=True) if pair_of[0] != pair_of[1]]
        side = {part: item for part, item in _by_part(items).items() if part in given.a}
        if len(apart) != 1 or not all(map(str.isdecimal, apart[0])) or not _same_rows(side, given.b):
            continue
        looked_at += sum(map(_rows, side.values())) + len(wanted)
        if looked_at > _MOST_ROWS or not all(item.source.stored(item.entry) for item in side.values()):
            break
        found = match_rows(_stacked(side), wanted)
        left = found.only_a <= _padding(pair.batch_a) and found.only_b <= _padding(pair.batch_b)
        more = max(found.only_a, found.only_b, 2 * len(own.rows_a) - len(found.rows_a))
        if left and len(found.rows_a) > more:
            return slot.name
    return ""


def _idle(slot: Slot, side: Side, view: StepView) -> np.ndarray | None:
    """Return to which of a module's rows no gradient flows; None where that was not recorded."""
    found = _at_output(slot, side, view)
    return None if found is None else np.array([not row.any() for row in _stacked(found)], dtype=bool)


def _gradients_at_output(given: Given, pair: StepPair) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the gradients at a module's output, a row for each of its input; None where not recorded."""
    of_a, of_b = _at_output(given.slot, given.a, pair.a), _at_output(given.slot, given.b, pair.b)
    return (_stacked(of_a), _stacked(of_b)) if of_a and of_b and _same_rows(of_a, of_b) else None


def _at_output(slot: Slot, side: Side, view: StepView) -> Side | None:
    named = (s for s in view.named(Kind.ACTIVATION_GRAD, slot.name) if s.slot.startswith("out"))
    wanted = (s for s in named if (s.phase, s.call) == (slot.phase, slot.call))
    return next((found for s in wanted if (found := _of_same_rows(s, side, view))), None)


def _given_to(slot: Slot, a: Side, b: Side, pair: StepPair) -> Iterator[Given]:
    """Yield the inputs of the module, the outermost around it with as many rows first."""
    parts = slot.name.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        given = Slot(slot.phase, Kind.ACTIVATION, name, "in.0", slot.call)
        found_a, found_b = (_of_same_rows(given, side, view) for side, view in ((a, pair.a), (b, pair.b)))
        if found_a is None or found_b is None or not _same_rows(found_a, found_b):
            continue
        if not _are_positions((*found_a.values(), *found_b.values())):
            yield Given(given, found_a, found_b)


def _are_positions(items: Sequence[Item]) -> bool:
    """Tell whether all parts are given the same, and rows that differ: those are no rows of the batch."""
    if not all(map(_rows, items)) or not same_everywhere(items):
        return False
    rows = items[0].read()
    return bool((rows != rows[:1]).any())


def _of_same_rows(slot: Slot, side: Side, view: StepView) -> Side | None:
    """Return another tensor in the same parts, None where it is not of as many rows in each."""
    found = {part: item for part, item in _by_part(view.items.get(slot, ())).items() if part in side}
    if found.keys() != side.keys() or any(
        len(item.entry.local_shape) < 2
        or _rows(item) != _rows(side[part])
        or not item.source.stored(item.entry)
        for part, item in found.items()
    ):
        return None
    return found


def _same_rows(a: Side, b: Side) -> bool:
    """Tell whether the tensors of all parts have rows of one shape."""
    shapes = [item.entry.local_shape for side in (a, b) for item in side.values()]
    return all(shapes) and len({shape[1:] for shape in shapes}) == 1


def _by_part(items: Sequence[Item]) -> Side:
    return {item.part: item for item in items if item.part is not None}


def _rows(item: Item) -> int:
    return item.entry.local_shape[0]


def _stacked(side: Side) -> np.ndarray:
    return np.concatenate([side[part].read() for part in sorted(side)])


def _padding(batch: Batch) -> int:
    held = sum(extent.rows * (extent.positions or 1) for extent in batch.extents.values())
    rows = (row for row in batch.rows if not row.idle)
    return held - sum(row.stop - row.start if batch.extents[row.part].positions else 1 for row in rows)


def _one_scale(pair: StepPair, scale_b: Callable[[Row], float]) -> float:
    scales = {scale_b(row) for _, row in pair.pairing.pairs}
    if not scales:
        raise NotComparable("no rows were recorded, so that no token's weight is known")
    if len(scales) != 1 and not np.allclose(list(scales), min(scales), rtol=1e-5, atol=0):
        raise NotComparable("tokens of several parts weigh differently, and which row is whose is not known")
    return scales.pop()
