"""What went wrong between ranks: a reduction over some of them only, or in a lower precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.values import SHARPER, rounded_to
from tensortrace.diff.compare import EPS
from tensortrace.diff.gradients import CLIP
from tensortrace.tracer.types import Kind

_RUNGS = frozenset({Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD})
_Group = tuple[int, ...]


def wrong_group(case: Case) -> Sequence[Proposal]:
    """Propose that a gradient was reduced over groups of ranks that are too small."""
    slot = case.origin.node.slot
    if slot.kind not in _RUNGS or slot.name == CLIP:
        return ()
    gradients, name = case.pair.gradients_b, slot.name
    local = {cell: value.astype(np.float64) for cell, value in gradients.local(name).items()}
    rung = gradients.rung_copies(slot.kind, name) if slot.kind != Kind.CLIPPED_GRAD else ()
    copies = rung or gradients.unclipped_copies(name)
    reference = case.pair.gradients_a.unclipped(name)
    held = [copy for copy in copies if copy.cell in local]
    if len(local) < 3 or not held or reference is None:
        return ()
    actual = [copy.read().astype(np.float64) for copy in held]
    if not all(np.isfinite(x).all() for x in (*actual, *local.values())):
        return ()
    floor = case.gradient_floor(held)
    proposals = []
    for groups, words in _splits(sorted(local)):
        of = {cell: group for group in groups for cell in group}
        sums = {group: np.asarray(sum(local[cell] for cell in group)) for group in groups}
        mine = [sums[of[copy.cell]] for copy in held]
        factor = _factor(mine, actual)
        text = f"{name} is reduced over {words} of b only: {', '.join(map(str, groups[:4]))}"
        proposals.append(
            Proposal(
                "reduction.wrong_group", text, [factor * m for m in mine], actual,
                [reference.read().astype(np.float64) for _ in held], float(len(groups[0])),
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
                    [reference.read().astype(np.float64) for _ in held], float(len(group)),
                    "ranks that were reduced over", floor=floor,
                )
            )  # fmt: skip
    return proposals


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


def reduce_dtype(case: Case) -> Sequence[Proposal]:
    """Propose that ranks' gradients were rounded to a lower precision before they were added up."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind not in _RUNGS or slot.name == CLIP or loaded is None:
        return ()
    gradients = case.pair.gradients_b
    local = [v.astype(np.float64) for _, v in sorted(gradients.local(slot.name).items())]
    if len(local) < 2 or not all(np.isfinite(v).all() for v in local):
        return ()
    items = gradients.local_items(slot.name)
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    factor = _factor([np.asarray(sum(local))], [a])  # from the sum over b's ranks to a correct gradient
    proposals = []
    for dtype in SHARPER:
        if all(EPS.get(i.entry.dtype, 0.0) >= EPS[dtype] for i in items):
            continue  # they were no finer before
        for mistaken in _reduced_in(dtype, local, factor):
            text = (
                f"gradients of {slot.name} on {len(local)} ranks of b were rounded to {dtype} to be reduced"
            )
            proposals.append(
                Proposal(
                    "precision.reduce_dtype", text, [mistaken], [b], [a], EPS[dtype], dtype,
                    floor=case.gradient_floor(items),
                )
            )  # fmt: skip
    return proposals


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
