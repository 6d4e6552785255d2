"""Numbers of one run over its steps: loss, norms, and what enters the update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tensortrace.diff.catalog import Catalog, Item, StepView
from tensortrace.diff.logical import Unplaceable
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.types import Kind

CLIP = "(clip)"

Series = dict[str, dict[int, float]]
"""A number's name, and its value by step (in the run's own numbers)."""


def series_of(catalog: Catalog, steps: Sequence[int]) -> Series:
    """Return what the run's loss, norms and schedule were in these steps; what can't be read is left out."""
    found: Series = defaultdict(dict)
    for step in steps:
        for name, value in _of_step(catalog.view(step)):
            if math.isfinite(value):
                found[name][step] = value
    return dict(found)


def _of_step(view: StepView) -> Iterator[tuple[str, float]]:
    yield from _losses(view)
    yield from _norms(view)
    for slot, items in view.find(Kind.SCHEDULE):
        if (value := _number(items)) is not None:
            yield f"schedule {slot.name} {slot.slot}", value


def _losses(view: StepView) -> Iterator[tuple[str, float]]:
    """Yield the mean loss of the step's valid tokens, term by term, and their number."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for slot, items in view.find(Kind.LOSS, phase="train"):
        if slot.slot in ("sum", "count"):
            for item in items:
                sums[slot.name][slot.slot] += _read(item) or 0.0
    for name, found in sums.items():
        if found.get("count"):
            yield f"loss {name}, mean per token", found["sum"] / found["count"]
            yield f"valid tokens of {name}", found["count"]


def _norms(view: StepView) -> Iterator[tuple[str, float]]:
    clips = {slot.slot: items for slot, items in view.find(Kind.CLIPPED_GRAD) if slot.name == CLIP}
    for slot, label in (
        ("total_norm", "gradient norm before clipping"), ("coefficient", "clip coefficient"),
    ):  # fmt: skip
        if slot in clips and (value := _number(clips[slot])) is not None:
            yield label, value
    consumed = [i for s, i in view.find(Kind.CLIPPED_GRAD) if s.slot == "grad" and s.phase == "window"]
    yield from _norm("gradient norm that the optimizer consumes", consumed)
    yield from _norm("parameter norm", [i for s, i in view.find(Kind.PARAM) if s.slot == "model"])


def _norm(label: str, held: Sequence[Sequence[Item]]) -> Iterator[tuple[str, float]]:
    """Yield the norm of tensors taken together, from the statistics of one copy of each."""
    last = [max(items, key=lambda i: (-i.source.rank, i.entry.event)) for items in held if items]
    norms = [item.entry.stats.l2 if item.entry.stats else None for item in last]
    known = [norm for norm in norms if norm is not None]
    if known and len(known) == len(norms):
        yield label, math.hypot(*known)


def _number(items: Iterable[Item]) -> float | None:
    """Return the number that the lowest rank recorded last."""
    item = max(items, key=lambda i: (-i.source.rank, i.entry.event), default=None)
    return None if item is None else _read(item)


def _read(item: Item) -> float | None:
    if math.prod(item.entry.local_shape) != 1 or not item.source.stored(item.entry):
        return None
    try:
        value = item.read().reshape(-1)[0]
    except (TraceError, Unplaceable):
        return None
    return None if value.dtype.kind == "c" else float(value)
