"""What tensor hooks of the program do to the gradients of some parts of a batch alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensortrace.diff.catalog import Part
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.gradients import part_scale
from tensortrace.tracer.types import Kind

_ONE = 1e-5
"""Relative difference up to which what a hook left is a multiple of what it was given, and all are one."""


def on_some(case: Case) -> Iterator[Proposal]:
    """Propose one factor by which hooks of ``b`` multiply the gradient of some ranks' passes, not of all."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.LOCAL_GRAD or slot.slot != "hooked" or loaded is None:
        return
    gradients, scale = case.pair.gradients_b, part_scale(case.pair)
    given, left = gradients.local_items(slot.name), gradients.hooked_parts(slot.name)
    changed = [(x, y) for x, y in zip(given, left, strict=False) if x is not y]
    if not changed or len(changed) == len(given) or any(x.entry.microbatch is None for x, _ in changed):
        return
    factors, more = [], np.zeros(loaded.a.shape)
    for x, y in changed:
        before, after = x.read().astype(np.float64), y.read().astype(np.float64)
        square = float(np.vdot(before, before))
        factors.append(float(np.vdot(before, after)) / square if square else 0.0)
        if not np.linalg.norm(after - factors[-1] * before) <= _ONE * np.linalg.norm(after):
            return
        more = more + before / scale(Part(x.cell, "train", x.entry.microbatch or 0))
    factor = float(np.median(factors))
    if not factor or not np.allclose(factors, factor, rtol=_ONE, atol=0.0):
        return
    ranks = ", ".join(str(rank) for rank in sorted({x.cell for x, _ in changed}))
    digits = 9 if abs(factor - 1) < _ONE else 6
    times = f"by {factor:.{digits}g} on rank {ranks} of b alone"
    text = f"a tensor hook multiplies the gradient of {slot.name} {times}"
    mistaken = loaded.a + (factor - 1) * more
    yield Proposal("scale.other", text, [mistaken], [loaded.b], [loaded.a], factor, fitted=1)
