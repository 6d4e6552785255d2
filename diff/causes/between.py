"""What went wrong between ranks: a reduction over some of them only, or in a lower precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from tensortrace.diff.assemble import by_rows
from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.holders import local_of_copies
from tensortrace.diff.causes.values import SHARPER, rounded_to
from tensortrace.diff.compare import EPS
from tensortrace.diff.gradients import CLIP
from tensortrace.diff.kinds import RUNGS
from tensortrace.diff.logical import Member, Together
from tensortrace.diff.plan.comparison import Comparison, replica
from tensortrace.diff.window import Window
from tensortrace.tracer.types import Kind

_Group = tuple[int, ...]

MOST_ELEMENTS = 1 << 22
"""So many elements of a tensor are looked at: what happens between ranks happens to each alike."""


def wrong_group(case: Case) -> Sequence[Proposal]:
    """Propose that a gradient was reduced over groups of ranks that are too small."""
    slot = case.origin.node.slot
    if slot.kind not in RUNGS or slot.name == CLIP:
        return ()
    gradients, name = case.pair.gradients_b, slot.name
    rung = gradients.rung_copies(slot.kind, name) if slot.kind != Kind.CLIPPED_GRAD else ()
    copies = rung or gradients.unclipped_copies(name)
    reference = case.pair.gradients_a.unclipped(name)
    local = {rank: _some(value) for rank, value in local_of_copies(gradients, name, copies).items()}
    keys = {copy.source.rank: copy.source.rank for copy in copies}
    if len(local) < 3:  # copies that several ranks hold together: by who was given which rows
        local = {cell: _some(value) for cell, value in gradients.local(name).items()}
        keys = {copy.source.rank: copy.cell for copy in copies}
    held = [copy for copy in copies if keys[copy.source.rank] in local]
    if len(local) < 3 or not held or reference is None:
        return ()
    actual = [_some(copy.read()) for copy in held]
    right = _some(reference.read())
    if not all(np.isfinite(x).all() for x in (*actual, *local.values())):
        return ()
    floor = case.gradient_floor(held)
    proposals = []
    for groups, words in _splits(sorted(local)):
        of = {cell: group for group in groups for cell in group}
        sums = {group: np.asarray(sum(local[cell] for cell in group)) for group in groups}
        mine = [sums[of[keys[copy.source.rank]]] for copy in held]
        factor = _factor(mine, actual)
        text = f"{name} is reduced over {words} of b only: {', '.join(map(str, groups[:4]))}"
        proposals.append(
            Proposal(
                "reduction.wrong_group", text, [factor * m for m in mine], actual,
                [right for _ in held], float(len(groups[0])),
                "ranks that were reduced over", floor=floor,
            )
        )  # fmt: skip
        for group in groups if len(groups) > 1 else ():
            same = [sums[group] for _ in held]  # one group's result, which all ranks were given
            factor = _factor(same, actual)
            text = f"{name} holds the gradients of rank {', '.join(map(str, group))} of b only"
            proposals.append(
                Proposal(
                    "reduction.wrong_group", text, [factor * m for m in same], actual,
                    [right for _ in held], float(len(group)),
                    "ranks that were reduced over", floor=floor,
                )
            )  # fmt: skip
    return proposals


def _some(value: np.ndarray) -> np.ndarray:
    return np.ravel(value)[:MOST_ELEMENTS].astype(np.float64)


def _splits(cells: Sequence[int]) -> Iterator[tuple[tuple[_Group, ...], str]]:
    """Yield what ranks are usually split into: neighbours, or every n-th."""
    count = len(cells)
    for size in range(2, count):
        if count % size:
            continue
        neighbours = tuple(tuple(cells[i : i + size]) for i in range(0, count, size))
        strided = tuple(tuple(cells[i :: count // size]) for i in range(count // size))
        yield neighbours, f"groups of {size} neighbouring ranks"
        if strided != neighbours:
            yield strided, f"groups of {size} ranks, {count // size} apart"


def _factor(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    size = sum(float(np.vdot(x, x)) for x in expected)
    return sum(float(np.vdot(x, y)) for x, y in zip(expected, actual, strict=True)) / size if size else 0.0


def not_added_up(case: Case) -> Sequence[Proposal]:
    """Propose that ranks of one data cell keep contributions of their own, which add up to the reference."""
    entry = case.origin.comparison
    if not case.origin.ranks or not isinstance(entry, Comparison) or entry.exact or not entry.items_a:
        return ()
    if any(isinstance(item.source, Window) for item in entry.items_b):
        return ()  # of what is too large to hold, members are not there block by block
    held = [Item(m.source, m.entry, i.part, i.call, i.cell) for i in entry.items_b for m in _members(i)]
    if entry.slot.phase == "window":
        held = [*entry.copies_b] if len(entry.copies_b) > 1 else held
        reference = replica(entry.items_a).read().astype(np.float64)
        values = [item.read().astype(np.float64) for item in held]
    else:
        ranks = sorted({item.source.rank for item in held})
        sides = [
            by_rows(entry.items_a, [i for i in held if i.source.rank == rank], case.pair.pairing)
            for rank in ranks
        ]
        values = [side.b.astype(np.float64) for side in sides]
        reference = sides[0].a.astype(np.float64) if sides else np.zeros(())
    same_cell = len({item.cell for item in held}) < len({item.source.rank for item in held})
    if len(values) < 2 or not same_cell or any(v.shape != reference.shape for v in values):
        return ()
    total = np.asarray(sum(values))
    if not np.isfinite(total).all() or not np.isfinite(reference).all():
        return ()
    factor = _factor([total], [reference])
    code, what = "reduction.missing", f"what {len(values)} ranks of b hold of {entry.slot.name}"
    if tied := _tied(case, entry.slot.name):
        code, what = "tied.not_summed", f"the gradients of b for the uses of {' and '.join(tied)}"
    text = f"{what} should be added up over rank {', '.join(str(i.source.rank) for i in held)}: the sum"
    text += f" times {factor:.6g} is the reference" if abs(factor - 1) > 1e-4 else " is the reference"
    floor = case.gradient_floor(held)
    return (
        Proposal(
            code, text, [total * factor], [reference], [values[0]], float(len(values)),
            "contributions that were not added up", floor=floor,
        ),
    )  # fmt: skip


def _members(item: Item) -> Sequence[Member]:
    return item.source.members if isinstance(item.source, Together) else ()


def _tied(case: Case, name: str) -> tuple[str, ...]:
    """Return the names under which the reference uses a tied parameter; empty where it is not tied."""
    found = case.pair.a.items.get(Slot("window", Kind.PARAM, name, "model", 0), ())
    aliases = {alias for item in found for alias in item.entry.meta.aliases}
    return tuple(sorted({name, *aliases})) if aliases else ()


def reduce_dtype(case: Case) -> Iterator[Proposal]:
    """Propose that ranks' gradients were rounded to a lower precision before they were added up."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind not in RUNGS or slot.name == CLIP or loaded is None:
        return
    gradients = case.pair.gradients_b
    local = [_some(value) for _, value in sorted(gradients.local(slot.name).items())]
    if len(local) < 2 or not all(np.isfinite(v).all() for v in local):
        return
    items = gradients.local_items(slot.name)
    a, b = _some(loaded.a), _some(loaded.b)
    factor = _factor([np.asarray(sum(local))], [a])  # from the sum over b's ranks to a correct gradient
    for dtype in SHARPER:
        if all(EPS.get(i.entry.dtype, 0.0) >= EPS[dtype] for i in items):
            continue  # they were no finer before
        summed = _summed_in(dtype, items)
        ways = [_reduced_in(dtype, local, factor)]
        ways += [_reduced_in(dtype, summed, factor)] if len(summed) == len(local) else []
        for mistaken in chain.from_iterable(ways):
            text = (
                f"gradients of {slot.name} on {len(local)} ranks of b were rounded to {dtype} to be reduced"
            )
            yield Proposal(
                "precision.reduce_dtype", text, [mistaken], [b], [a], EPS[dtype], dtype,
                floor=case.gradient_floor(items),
            )  # fmt: skip


def _summed_in(dtype: str, items: Sequence[Item]) -> list[np.ndarray]:
    """Return each rank's gradient with its microbatches added up in the dtype too; [] of one microbatch."""
    found: dict[int, np.ndarray] = {}
    for item in sorted(items, key=lambda i: i.entry.microbatch or 0):
        own = _some(item.read())
        found[item.cell] = rounded_to(found[item.cell] + own if item.cell in found else own, dtype)
    return [value for _, value in sorted(found.items())] if len(found) < len(items) else []


def _reduced_in(dtype: str, local: Sequence[np.ndarray], factor: float) -> Iterator[np.ndarray]:
    """Yield the reduced gradient: divided before, or after; added up in the dtype in any order, or wider."""
    count = len(local)
    before = [rounded_to(v / count, dtype) for v in local]
    plain = [rounded_to(v, dtype) for v in local]
    for parts, left in ((before, factor * count), (plain, factor)):
        yield np.asarray(sum(parts)) * left
        for first in range(count if count > 2 else 1):
            total = parts[first]
            for number in range(1, count):
                total = rounded_to(total + parts[(first + number) % count], dtype)
            yield total * left
            if left == factor:  # the sum is divided in the dtype as well
                yield rounded_to(total / count, dtype) * factor * count
