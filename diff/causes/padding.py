"""Padding that influences what it should not: pooled, attended to, normalised with the tokens of its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Part, Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.extent import Extent
from tensortrace.diff.masks import has_padding, to_the_end
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

CODE = "mask.padding_leak"
_ROUND_OFF = 2.0**-18
"""Of a mean over positions, added up in another order."""

_POOLS: tuple[tuple[str, Callable[[np.ndarray], np.ndarray]], ...] = (
    ("the mean", lambda row: np.asarray(row.mean(axis=0))),
    ("the sum", lambda row: np.asarray(row.sum(axis=0))),
    ("the greatest", lambda row: np.asarray(row.max(axis=0))),
    ("the last position", lambda row: np.asarray(row[-1])),
)


def pooled(case: Case) -> Iterator[Proposal]:
    """Propose that b pools over all positions of its rows, padding included."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or loaded is None or set(loaded.lengths) != {1}:
        return
    for source in _given(case):
        rows = [_row(source, owner, case) for owner in loaded.owners]
        whole = [row.astype(np.float64) for row in rows if row is not None]
        if len(whole) < len(rows) or any(row.shape[1:] != loaded.b.shape[1:] for row in whole):
            continue
        for words, pool in _POOLS:
            padded = _padded(case, loaded) or _shorter(whole, loaded.a, pool)
            if not any(padded):
                continue
            mistaken = np.stack([pool(row) for row in whole])
            text = f"{slot.name} is given {words} over all positions in b, padding included"
            if slot.slot.startswith("out"):
                text = f"{slot.name} takes {words} over all positions in b, padding included"
            yield Proposal(
                CODE, text, [mistaken], [loaded.b], [loaded.a], float(sum(padded)),
                "rows that have padding", simplicity=-1, floor=_ROUND_OFF, tried=len(_POOLS),
            )  # fmt: skip


def _shorter(
    rows: list[np.ndarray], pooled: np.ndarray, pool: Callable[[np.ndarray], np.ndarray]
) -> list[bool]:
    """Tell which rows the reference pools up to some position only; [] where it pools otherwise.

    That tells padding where a program is given lengths, or counts tokens itself.
    """
    found = []
    for row, value in zip(rows, pooled.astype(np.float64), strict=True):
        near = _ROUND_OFF * float(np.linalg.norm(value))
        ends = (n for n in range(len(row), 0, -1) if np.linalg.norm(pool(row[:n]) - value) <= near)
        end = next(ends, None)
        if end is None:
            return []
        found.append(end < len(row))
    return found


def _padded(case: Case, loaded: Assembled) -> list[bool]:
    """Tell for each row whether it has padding in b; empty where no row has, or that is not known."""
    extents = case.pairing.extents_b
    found = []
    for row in loaded.owners:
        extent = extents.get(row.part)
        found.append(
            extent is not None and bool(extent.positions) and row.stop - row.start < (extent.positions or 0)
        )
    return found if any(found) else []


def _masked_in_one(case: Case, loaded: Assembled) -> list[bool]:
    """Tell for each row whether it has padding by a mask that the module is given in a and not in b."""
    slot, extents = case.origin.node.slot, case.pairing.extents_a
    given = (s for s in case.pair.a.named(Kind.ACTIVATION, slot.name) if s.slot.startswith("in"))
    same = {y: x for x, y in case.pairing.pairs}
    for mask in given:
        if (mask.phase, mask.call) != (slot.phase, slot.call) or case.pair.b.items.get(mask):
            continue
        parts = {i.part: i for i in case.pair.a.items[mask] if i.part in extents and i.source.stored(i.entry)}
        padded = {part: has_padding(item.read(), extents[part].rows) for part, item in parts.items() if part}
        rows = [same.get(row) for row in loaded.owners]
        if rows and all(row is not None and len(padded.get(row.part, ())) > row.number for row in rows):
            return [padded[row.part][row.number] for row in rows if row is not None]
    return []


def _given(case: Case) -> list[Slot]:
    """Return the activations that an origin of b was computed from."""
    view, slot = case.pair.b, case.origin.node.slot
    found: dict[Slot, None] = {}
    for item in view.items.get(slot, ()):
        found |= {s: None for s, _ in view.producers(item) if s.kind == Kind.ACTIVATION}
    if slot.slot.startswith("out"):
        found |= {s: None for s in view.named(Kind.ACTIVATION, slot.name) if s.slot.startswith("in")}
    return list(found)


def _row(slot: Slot, row: Row, case: Case) -> np.ndarray | None:
    """Return one row of an activation of b, all positions [positions, …]; None where it has no such row."""
    extent = case.pairing.extents_b[row.part]
    item = _of_part(case.pair.b.items.get(slot, ()), row.part)
    if item is None or extent.packed or item.entry.local_shape[:2] not in _sizes(extent):
        return None
    values = item.read()
    return np.asarray(values[:, row.number] if extent.time_major else values[row.number])


def _sizes(extent: Extent) -> tuple[tuple[int, int], ...]:
    """Return the sizes of all positions of all rows, and of all but one: scores of the next tokens."""
    rows, positions = extent.rows, extent.positions or 0
    found = ((rows, positions), (rows, positions - 1))
    return tuple(sizes[::-1] for sizes in found) if extent.time_major else found


def _of_part(items: tuple[Item, ...], part: Part) -> Item | None:
    return next((item for item in items if item.part == part), None)


def attended(case: Case) -> Iterator[Proposal]:
    """Propose that padding reaches valid positions: rows that have some are wrong, the others right."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or loaded is None or loaded.exact:
        return
    padded = _padded(case, loaded) or _masked_in_one(case, loaded)
    if sum(padded) < 2 or all(padded):
        return
    of_row = np.repeat(padded, loaded.lengths)
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    wrong = _wrong_rows(a, b, loaded.lengths, case.floor)
    if wrong != padded:
        return
    mistaken = np.where(of_row.reshape(-1, *(1,) * (a.ndim - 1)), b, a)
    text = (
        f"{slot.name} is wrong in all {sum(padded)} rows of b that have padding and right in the "
        f"{len(padded) - sum(padded)} that have none: padding reaches the valid positions"
    )
    yield Proposal(
        CODE, text, [mistaken], [b], [a], float(sum(padded)), "rows that have padding", simplicity=3
    )  # fmt: skip


def unmasked(case: Case) -> Iterator[Proposal]:
    """Propose that b does not put to zero the ends of padded rows that the reference puts to zero.

    It is told from the values alone (what halves the time leaves no mask of its size): ends of rows, along
    one dimension, at which all elements of the reference are exactly 0.
    """
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or loaded is None or loaded.exact or set(loaded.lengths) != {1}:
        return
    a, b, padded = loaded.a, loaded.b, np.asarray(_padded(case, loaded), dtype=bool)
    for dimension in range(1, a.ndim):
        ends = _dead_ends(a, dimension)
        undone = np.where(ends, 0.0, b.astype(np.float64))
        many = ends.any(axis=tuple(range(1, a.ndim)))
        if not many.any() or not padded.any() or (many & ~padded).any():
            continue
        text = (
            f"{slot.name} holds values in b at the ends of {many.sum()} padded rows, along dimension "
            f"{dimension}, where the reference has zeros: padding is not masked"
        )
        yield Proposal(
            CODE, text, [undone], [a], [b], float(many.sum()), "rows whose padding is not masked",
            simplicity=2, tried=a.ndim - 1,
        )  # fmt: skip


def _dead_ends(values: np.ndarray, dimension: int) -> np.ndarray:
    """Return where a row holds nothing but zeros from there to its end along a dimension; it broadcasts."""
    others = tuple(d for d in range(1, values.ndim) if d != dimension)
    dead = np.all(values == 0, axis=others, keepdims=True)
    return to_the_end(dead, dimension)


def _wrong_rows(a: np.ndarray, b: np.ndarray, lengths: tuple[int, ...], floor: float) -> list[bool]:
    """Tell for each row whether it differs by more than the floor, relative to a typical row."""
    typical = np.sqrt(np.mean(a[np.isfinite(a)] ** 2)) if a.size else 0.0
    found = []
    for x, y in zip(np.split(a, np.cumsum(lengths)[:-1]), np.split(b, np.cumsum(lengths)[:-1]), strict=True):
        apart = float(np.sqrt(np.mean((y - x) ** 2))) if x.size else 0.0
        found.append(not apart <= floor * float(typical))
    return found
