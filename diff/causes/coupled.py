"""Modules that compute statistics over their rank's batch: another split of the batch, another result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Part
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.tracer.types import COUPLES_ROWS, Kind

_EPS = 1e-3
"""The constant that a normalisation adds to the variance, unknown here, shows below this."""


def by_batch(case: Case) -> Sequence[Proposal]:
    """Propose that a batch norm normalised each part of the batch by itself, and the parts differ."""
    entry, loaded = case.origin.comparison, case.origin.assembled
    if not isinstance(entry, Comparison) or loaded is None or entry.slot.kind != Kind.ACTIVATION:
        return ()
    metas = [item.entry.meta for item in (*entry.items_a, *entry.items_b)]
    parts = _parts(case, loaded)
    if parts is None or not all(meta.op == COUPLES_ROWS for meta in metas) or loaded.a.ndim < 2:
        return ()
    left, right = parts
    if left == right:
        return ()
    mistaken = _renormalised(loaded.a.astype(np.float64), left, right)
    number = len(set(right))
    text = (
        f"{metas[-1].module} {entry.slot.name} computes its statistics over each rank's microbatch: "
        f"{len(set(left))} in a, {number} in b; no two splits of the batch give the same"
    )
    return (
        Proposal(
            "batch.coupled", text, [mistaken], [loaded.b], [loaded.a], float(number), "parts of the batch",
            simplicity=-1, floor=_EPS,
        ),
    )  # fmt: skip


def _parts(case: Case, loaded: Assembled) -> tuple[list[int], list[int]] | None:
    """Return for each index of the first dimension the number of its part in both runs."""
    counterpart = {y: x for x, y in case.pair.pairing.pairs}
    owners = [o for o, n in zip(loaded.owners, loaded.lengths, strict=True) for _ in range(n)]
    if not owners or any(owner not in counterpart for owner in owners):
        return None
    return _numbered([counterpart[o].part for o in owners]), _numbered([o.part for o in owners])


def _numbered(parts: Sequence[Part]) -> list[int]:
    """Return the parts as numbers in order of their first index, so that equal splits are equal lists."""
    order = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    return [order[part] for part in parts]


def _renormalised(out: np.ndarray, left: Sequence[int], right: Sequence[int]) -> np.ndarray:
    """Return a's output as it were with b's parts: per channel (dimension 1), the same scale and shift.

    Within a part of ``a`` the output's mean is the shift, its deviation the scale.
    """
    axes = (0, *range(2, out.ndim))
    mean, deviation = _moments(out, left, axes)
    shift, scale = np.mean(mean, axis=0), np.mean(deviation, axis=0)
    result = np.empty_like(out)
    by_part: dict[int, list[int]] = defaultdict(list)
    for index, part in enumerate(right):
        by_part[part].append(index)
    for indices in by_part.values():
        rows = out[indices]
        spread = rows.std(axis=axes, keepdims=True)
        centred = rows - rows.mean(axis=axes, keepdims=True)
        result[indices] = shift + centred * scale / np.where(spread > 0, spread, 1.0)
    return result


def _moments(out: np.ndarray, parts: Sequence[int], axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.asarray(parts)
    pieces = [out[numbers == part] for part in sorted(set(parts))]
    mean = np.stack([piece.mean(axis=axes, keepdims=True)[0] for piece in pieces])
    return mean, np.stack([piece.std(axis=axes, keepdims=True)[0] for piece in pieces])
