"""Updates that compute with other numbers than they state: betas, flags, the count of updates, the rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Slot
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.compare import EPS
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.plan.updates import as_real, expected, update_inputs
from tensortrace.diff.update import UpdateInputs
from tensortrace.tracer.types import INIT_STEP, Kind

_COUNTS = 64
"""Up to how many updates the count is sought that explains a bias correction."""

_MANY = 1e9
"""A count from which on nothing is corrected."""

_DECOUPLED = ("Adam", "AdamW")
"""Optimizers of which both ways to decay weights are in use."""

_NO_CHANGE = 1e-3
"""Share of an update below which none was made."""


class _Update(NamedTuple):
    """One value that an update of ``b`` left, what its formula read, and what was there before; all real."""

    slot: Slot
    inputs: UpdateInputs
    before: np.ndarray
    actual: np.ndarray
    eps: float

    def changed(self, value: np.ndarray) -> np.ndarray:
        """Return a value less what was there: mistakes are seen beside the change."""
        return np.asarray(value - self.before)


def _updates(case: Case) -> list[_Update]:
    """Return what the updates of the origin and its siblings read and left; none where any is not known."""
    slot = case.origin.node.slot
    if slot.kind not in (Kind.OPTIMIZER_STATE, Kind.PARAM) or case.origin.node.step == INIT_STEP:
        return []
    if slot.slot in ("start", "step"):
        return []
    found = []
    for outcome in case.siblings:
        own = outcome.node.slot
        inputs, items = update_inputs(own.name, case.pair.b, case.pair.before_b), case.pair.b.items.get(own)
        if inputs is None or not items or expected(own, inputs) is None:
            return []
        actual = as_real(replica(items).read())
        before = (
            inputs.param if own.kind == Kind.PARAM else inputs.before.get(own.slot, np.zeros_like(actual))
        )
        eps = EPS.get(replica(items).entry.dtype, EPS["float32"])
        found.append(_Update(own, inputs, before, actual, eps))
    return found


def _floor(updates: Sequence[_Update]) -> float:
    """Return what roundings of stored values are, relative to all changes."""
    size = math.sqrt(sum(float(np.sum(u.changed(u.actual) ** 2)) for u in updates))
    held = math.sqrt(sum(float(np.sum((u.eps * np.abs(u.actual)) ** 2)) for u in updates))
    return 32 * max((u.eps for u in updates), default=0.0) + (4 * held / size if size else 0.0)


Mistake = Callable[[UpdateInputs], UpdateInputs]


def _proposal(
    code: str, text: str, updates: Sequence[_Update], mistake: Mistake, number: float | None, tried: int
) -> Proposal | None:
    """Return that all values are what the formula makes of other inputs; None where it says the same."""
    mistaken, reference = [], []
    for update in updates:
        made, right = expected(update.slot, mistake(update.inputs)), expected(update.slot, update.inputs)
        if made is None or right is None:
            return None
        mistaken.append(update.changed(made))
        reference.append(update.changed(right))
    if all(np.array_equal(x, y) for x, y in zip(mistaken, reference, strict=True)):
        return None
    actual = [update.changed(update.actual) for update in updates]
    return Proposal(code, text, mistaken, actual, reference, number, None, floor=_floor(updates), tried=tried)


def other_numbers(case: Case) -> Iterator[Proposal]:
    """Propose that an update computes with betas, a decay or flags that are not those it states."""
    updates = _updates(case)
    if not updates:
        return
    hypers = updates[0].inputs.hypers
    choices: list[tuple[str, dict[str, float], float | None]] = []
    if {"betas.0", "betas.1"} <= hypers.keys():
        first, second = hypers["betas.0"], hypers["betas.1"]
        text = f"the betas {first:g} and {second:g} are used in each other's place"
        choices.append((text, {"betas.0": second, "betas.1": first}, second))
    for name in ("weight_decay", "dampening"):
        if hypers.get(name):
            choices.append((f"{name} {hypers[name]:g} is stated and not used", {name: 0.0}, 0.0))
    for name in ("maximize", "nesterov", "amsgrad", "centered"):
        if name in hypers and (name != "amsgrad" or "max_exp_avg_sq" in updates[0].inputs.after):
            word = "stated and not followed" if hypers[name] else "followed and not stated"
            choices.append((f"{name} is {word}", {name: float(not hypers[name])}, float(not hypers[name])))
    for text, changed, number in choices:
        told = f"{updates[0].slot.slot} of {len(updates)} tensors: {text}"
        found = _proposal(
            "optimizer.hyperparameter", told, updates, _with_hypers(changed), number, len(choices)
        )
        if found is not None:
            yield found


def other_decay(case: Case) -> Iterator[Proposal]:
    """Propose that decay is added to the gradient where it should shrink the weight, or the reverse."""
    updates = _updates(case)
    if not updates or any(
        u.inputs.optimizer not in _DECOUPLED or not u.inputs.hypers.get("weight_decay") for u in updates
    ):
        return
    text = f"{updates[0].slot.slot} of {len(updates)} parameters is what the other way to decay weights gives"
    found = _proposal("optimizer.weight_decay_mode", text, updates, _decaying_otherwise, None, 1)
    if found is not None:
        yield replace(found, equals="decay in the gradient for decay of the weight, or the reverse")


def _decaying_otherwise(inputs: UpdateInputs) -> UpdateInputs:
    decoupled = bool(inputs.hypers.get("decoupled_weight_decay")) or inputs.optimizer == "AdamW"
    hypers = {k: v for k, v in inputs.hypers.items() if k != "decoupled_weight_decay"}
    return replace(inputs, optimizer="Adam" if decoupled else "AdamW", hypers=hypers)


def _with_hypers(changed: dict[str, float]) -> Mistake:
    return lambda inputs: replace(inputs, hypers={**inputs.hypers, **changed})


def other_count(case: Case) -> Iterator[Proposal]:
    """Propose that an update corrects its moments as after another number of updates, or not at all."""
    updates = _updates(case)
    if not updates or case.origin.node.slot.kind != Kind.PARAM or "step" not in updates[0].inputs.after:
        return
    stated = float(np.ravel(updates[0].inputs.after["step"])[0])
    counts = [_MANY, *(float(n) for n in range(1, _COUNTS + 1) if n != stated)]
    for count in counts:
        how = "is not corrected for the bias of its moments"
        how = how if count == _MANY else f"corrects the bias of its moments as update {count:g}"
        text = f"the update of {len(updates)} parameters {how}; it is update {stated:g}"
        found = _proposal(
            "optimizer.step_counter", text, updates, _counted(count), None if count == _MANY else count,
            len(counts),
        )  # fmt: skip
        if found is not None:
            yield found


def _counted(count: float) -> Mistake:
    return lambda inputs: replace(inputs, after={**inputs.after, "step": np.asarray(count)})


def other_rate(case: Case) -> Iterator[Proposal]:
    """Propose that parameters change by a multiple of what they should: another learning rate is in force."""
    updates = _updates(case)
    if not updates or case.origin.node.slot.kind != Kind.PARAM:
        return
    right = [expected(u.slot, u.inputs) for u in updates]
    reference = [u.changed(made) for u, made in zip(updates, right, strict=True) if made is not None]
    actual = [u.changed(u.actual) for u in updates]
    size = sum(float(np.vdot(x, x)) for x in reference)
    if not size or not math.isfinite(size):
        return
    factor = sum(float(np.vdot(x, y)) for x, y in zip(reference, actual, strict=True)) / size
    if abs(factor) < _NO_CHANGE:
        return  # nothing was updated, which has a cause of its own
    rate = updates[0].inputs.hypers.get("lr", math.nan)
    text = (
        f"{len(updates)} parameters change by {factor:.6g} times what their update gives, as if lr were "
        f"{factor * rate:.6g} in the place of {rate:.6g}"
    )
    yield Proposal(
        "optimizer.hyperparameter", text, [x * factor for x in reference], actual, reference, factor * rate,
        floor=_floor(updates), fitted=1, simplicity=2,
    )  # fmt: skip
