"""How far an update may be from its formula: the roundings of what is stored, and round-off of the change.

An update keeps most of what was there. What is kept is rounded when it is stored, by half a spacing at a
time; what is added has round-off of its own size. So a change far below a parameter is judged by its own
size, and of a bfloat16 parameter what is left of one after rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.compare import EPS, Sides
from tensortrace.diff.formulas.inputs import UpdateInputs
from tensortrace.diff.masters import spacing
from tensortrace.diff.plan.updates import UpdateSource, amplified, beside, expected, unexplained
from tensortrace.diff.stream import one
from tensortrace.replay.contract import Own
from tensortrace.tracer.types import Kind

COMPUTED = 2.0
"""Spacings by which values may be off that are computed in the format in which they are stored."""

_OPMATH = 2.0**-23
"""Narrower formats are computed in float32 and rounded, by half a spacing, when they are stored."""

_STORES = {"NAdam": 2}
"""How often an update rounds the parameter, if not once; a decay that is taken off is one more."""

_DECAYING = frozenset({"AdamW", "Lion", "Adafactor"})


def _roundings(slot: Slot, inputs: UpdateInputs) -> int:
    """Return how often a value is stored: a running average where it is scaled, and where it is added to."""
    if slot.kind != Kind.PARAM:
        return 2
    decoupled = inputs.optimizer in _DECAYING or bool(inputs.hypers.get("decoupled_weight_decay"))
    decays = bool(inputs.hypers.get("lambd")) or (decoupled and bool(inputs.hypers.get("weight_decay")))
    return _STORES.get(inputs.optimizer, 1) + decays


def beyond_formula(slot: Slot, source: UpdateSource, actual: Item) -> Own:
    """Return how what an update left is judged by its formula."""

    def own() -> Iterator[Sides]:
        for inputs, value in beside(source, one(actual)):
            made = expected(slot, inputs)
            assert made is not None  # asked before
            yield excess(value, made, slot, inputs, actual.entry.dtype)

    return own


def excess(value: np.ndarray, made: np.ndarray, slot: Slot, inputs: UpdateInputs, dtype: str) -> Sides:
    """Return what roundings do not explain, and the size of the change."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = unexplained(value, made)
        stored = np.fmax(np.abs(made), np.abs(value))
        before = inputs.param if slot.kind == Kind.PARAM else inputs.before.get(slot.slot)
        if before is not None and before.shape == stored.shape:
            stored = np.fmax(stored, np.abs(before))
        eps = EPS[dtype]
        spacings = 0.5 * _roundings(slot, inputs) if eps > _OPMATH else COMPUTED
        slack = spacings * spacing(stored, dtype)
        left = np.sign(difference) * np.fmax(np.abs(difference) - slack, 0.0)
        change = _change(made, before, slot, inputs) + stored * min(_OPMATH / eps, 1.0) / 32
        return np.where(np.isnan(difference), difference, left), change * amplified(slot, inputs)


def _change(made: np.ndarray, before: np.ndarray | None, slot: Slot, inputs: UpdateInputs) -> np.ndarray:
    """Return the magnitude of what is added to what was there."""
    moved = np.abs(made - (0.0 if before is None else before))
    if slot.kind == Kind.PARAM:
        decay = abs(inputs.hypers.get("lr", 0.0) * inputs.hypers.get("weight_decay", 0.0))
        return np.asarray(moved + decay * np.abs(inputs.param))
    added = expected(slot, replace(inputs.magnitudes(), before={}))
    return moved if added is None else np.asarray(moved + np.abs(added))
