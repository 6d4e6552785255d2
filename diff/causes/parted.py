"""Mistakes where each rank's optimizer is given one part of all gradients: not added, or clipped alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.clip import by_own_norms
from tensortrace.diff.gradients import CLIP, Gradients
from tensortrace.diff.logical import Merged
from tensortrace.diff.plan.clips import final_events
from tensortrace.tracer.types import Kind

_MOST_ELEMENTS = 1 << 22
"""Of more gradients at once none are looked at: all of them are held."""


class _Part(NamedTuple):
    """What one rank's optimizer is given of a gradient: elements [start, stop) of it, flattened."""

    name: str
    rank: int
    start: int
    stop: int
    values: np.ndarray

    def of(self, whole: np.ndarray) -> np.ndarray:
        """Return the same elements of a whole tensor."""
        return np.ravel(whole)[self.start : self.stop].astype(np.float64)


def not_added(case: Case) -> Iterator[Proposal]:
    """Propose that each rank's part is of its own gradient alone."""
    slot, b = case.origin.node.slot, case.pair.gradients_b
    if slot.kind != Kind.CLIPPED_GRAD or slot.name == CLIP:
        return
    parts = _parts(b, [o.node.slot.name for o in case.siblings])
    local = {part.name: b.local(part.name) for part in parts}
    reference = {part.name: case.pair.gradients_a.consumed(part.name) for part in parts}
    kept = [p for p in parts if len(local[p.name]) > 1 and p.rank in local[p.name] and reference[p.name]]
    if not kept:
        return
    mine = [part.of(local[part.name][part.rank]) for part in kept]
    square = sum(float(np.vdot(x, x)) for x in mine)
    along = sum(float(np.vdot(x, part.values)) for x, part in zip(mine, kept, strict=True))
    factor = along / square if square else 0.0
    if not factor:
        return
    names = list(dict.fromkeys(part.name for part in kept))
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    count = len({part.rank for part in kept})
    text = f"{shown}: not reduced across ranks in b, each of {count} ranks takes its part of its own gradient"
    whole = [part.of(_read(reference[part.name])) for part in kept]
    items = [item for name in names for item in b.consumed_copies(name)]
    yield Proposal(
        "reduction.missing", text, [x * factor for x in mine], [part.values for part in kept], whole, factor,
        "each rank's own gradient", floor=case.gradient_floor(items),
    )  # fmt: skip


def clipped_alone(case: Case) -> Iterator[Proposal]:
    """Propose that code of the program's own clips each rank's part by the norm of that part alone.

    No function is seen to clip: the greatest norm is that which a's gradients have after it.
    """
    slot, a, b = case.origin.node.slot, case.pair.gradients_a, case.pair.gradients_b
    only_a = case.one_sided is not None and case.one_sided.side == "a"
    clips = slot.slot == "grad" or (slot.name == CLIP and only_a)
    if slot.kind != Kind.CLIPPED_GRAD or not clips or final_events(case.pair.b):
        return
    names = [n for n in b.names if a.consumed(n) and b.consumed(n) and b.local(n)]
    parts = _parts(b, names)
    if len({part.name for part in parts}) < len(names):
        return
    limit = math.sqrt(sum(float(np.sum(_read(a.consumed(n)).astype(np.float64) ** 2)) for n in names))
    whole = {n: np.asarray(sum(v.astype(np.float64) for v in b.local(n).values())) for n in names}
    before = [part.of(whole[part.name]) for part in parts]
    norms: dict[int, float] = {}
    for part, values in zip(parts, before, strict=True):
        norms[part.rank] = math.hypot(norms.get(part.rank, 0.0), float(np.linalg.norm(values)))
    if len(norms) < 2 or max(norms.values()) <= limit:
        return  # nothing would be clipped
    held = [(part.rank, x, part.values) for x, part in zip(before, parts, strict=True)]
    yield by_own_norms(held, norms, math.hypot(*norms.values()), limit, names, case)


def _read(item: Item | None) -> np.ndarray:
    assert item is not None  # asked before
    return item.read()


def _parts(gradients: Gradients, names: Sequence[str]) -> list[_Part]:
    """Return what the optimizers of several ranks are given, each its part; none where all are given all."""
    items = [(name, item) for name in names for item in gradients.consumed_copies(name)]
    if len(items) > len(names) or sum(math.prod(i.entry.local_shape) for _, i in items) > _MOST_ELEMENTS:
        return []
    found = [part for name, item in items for part in _parts_of(name, item)]
    return found if len({part.rank for part in found}) > 1 else []


def _parts_of(name: str, item: Item) -> Iterator[_Part]:
    if not isinstance(item.source, Merged):
        values = np.ravel(item.read()).astype(np.float64)
        yield _Part(name, item.source.rank, 0, len(values), values)
        return
    members = {member.rank: member for member in item.source.chosen}
    for held in item.source.parts:
        if held.region.flat and len(held.region.dims[0]) == 1:
            (start, stop), member = held.region.dims[0][0], members[held.rank]
            values = np.ravel(member.source.read(member.entry)).astype(np.float64)
            yield _Part(name, held.rank, start, stop, values)
