"""Modules that compute statistics over their rank's batch: another split of the batch, another result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Part, Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.drawing import given
from tensortrace.diff.plan.comparison import Comparison, replica
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


def other_mode(case: Case) -> Iterator[Proposal]:
    """Propose that a batch norm uses its running statistics in one run and those of the batch in the other.

    What it makes of equal inputs is then another scale and shift of each channel (dimension 1), which the
    batch's moments and the running ones tell.
    """
    entry, loaded = case.origin.comparison, case.origin.assembled
    if not isinstance(entry, Comparison) or loaded is None or entry.slot.kind != Kind.ACTIVATION:
        return
    if entry.slot.slot.startswith("in") or loaded.a.ndim < 2:
        return
    modes = [{item.entry.meta.training for item in items} for items in (entry.items_a, entry.items_b)]
    statistics = _running(case, entry.slot.name)
    passed = given(case)
    if {frozenset(mode) for mode in modes} != {frozenset({True}), frozenset({False})}:
        return
    if statistics is None or passed is None or passed.a.shape != loaded.a.shape:
        return
    parts = _parts(case, loaded)
    training = modes[1] == {True}
    numbers = np.asarray(parts[1 if training else 0] if parts else [0] * len(loaded.a))
    x, out = passed.a.astype(np.float64), loaded.a.astype(np.float64)
    for eps in _USUAL_EPS:
        mistaken = _in_other_mode(x, out, numbers, statistics, eps, training=training)
        names = ("evaluation", "training")
        text = (
            f"{entry.items_b[0].entry.meta.module} {entry.slot.name} is in {names[training]} mode in b, in "
            f"{names[not training]} mode in a"
        )
        yield Proposal(
            "mode.training", text, [mistaken], [loaded.b], [loaded.a], float(training),
            "the mode of the module", simplicity=-2, floor=_EPS, tried=len(_USUAL_EPS),
        )  # fmt: skip


_USUAL_EPS = (1e-5, 1e-3)
"""The constant that is added to the variance: torch's default, and that of EfficientNet and others."""


def _running(case: Case, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the running mean and variance that a module had before the step, None where it has none."""
    found = [
        case.pair.before_a.items.get(Slot("window", Kind.BUFFER, f"{name}.{what}", "model", 0), ())
        for what in ("running_mean", "running_var")
    ]
    if not all(found):
        return None
    mean, variance = (replica(items).read().astype(np.float64) for items in found)
    return mean, variance


def _in_other_mode(
    x: np.ndarray,
    out: np.ndarray,
    numbers: np.ndarray,
    running: tuple[np.ndarray, np.ndarray],
    eps: float,
    *,
    training: bool,
) -> np.ndarray:
    """Return a's output as it were in the other mode; ``numbers`` are the parts of the run that trains.

    Its own scale and shift are fitted to what it made of the same input in its own mode.
    """
    form = (1, -1, *(1,) * (x.ndim - 2))
    axes = (0, *range(2, x.ndim))
    batch, stored = np.empty_like(x), (x - running[0].reshape(form)) / np.sqrt(running[1].reshape(form) + eps)
    for number in np.unique(numbers):
        rows = x[numbers == number]
        spread = np.sqrt(rows.var(axis=axes, keepdims=True) + eps)
        batch[numbers == number] = (rows - rows.mean(axis=axes, keepdims=True)) / spread
    mine, other = (stored, batch) if training else (batch, stored)
    centred = mine - mine.mean(axis=axes, keepdims=True)
    size = np.sum(centred**2, axis=axes, keepdims=True)
    product = np.sum(centred * out, axis=axes, keepdims=True)
    scale = product / np.where(size > 0, size, 1.0)
    shift = out.mean(axis=axes, keepdims=True) - scale * mine.mean(axis=axes, keepdims=True)
    return np.asarray(other * scale + shift)


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
