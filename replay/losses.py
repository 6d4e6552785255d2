"""Contracts of the loss: what was counted and summed, what backward starts from, what each token weighs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import EPS
from tensortrace.diff.objective import known_parts
from tensortrace.diff.plan.comparison import coarser_eps
from tensortrace.replay.computed import computed, number_of
from tensortrace.replay.contract import Contract, Contracts, Ref, Step, beyond_number, microbatch_of, readable
from tensortrace.replay.objective import Objective, Weights, effective, wanted_weights, weights_of
from tensortrace.tracer.types import Kind

OTHER_TERM = "it is not the sum of the losses that are recognised, by their weights: it has another term"
NOT_ALONE = "several backward passes of one microbatch start from numbers of their own"
_ROOT = 16.0
"""Units of round-off within which what backward starts from is the sum of the losses that are known."""

WHOLE = "a loss's value follows from its own scores, which module replay is for"


class Weighed(NamedTuple):
    """A step with the weights that its tokens should have, and what they have in words.

    ``view`` is None where that is not known, ``noise`` the relative error of what is weighed.
    """

    view: StepView | None
    refs: frozenset[Ref]
    said: tuple[str, ...]
    noise: float = 0.0


def losses(step: Step, contracts: Contracts) -> None:
    """Add the contracts of what is recorded of losses beside their weights."""
    calls: dict[tuple[str, str, int], dict[tuple[object, str], tuple[Slot, Item]]] = defaultdict(dict)
    for slot, items in step.view.find(Kind.LOSS):
        for item in items:
            if slot.name == "backward" and slot.phase == "train":
                continue
            calls[slot.phase, slot.name, slot.call][item.part, slot.slot] = slot, item
    for held in calls.values():
        for part in dict.fromkeys(part for part, _ in held):
            _of_call({name: found for (at, name), found in held.items() if at == part}, contracts)
    _roots(step, contracts)


def _of_call(held: dict[str, tuple[Slot, Item]], contracts: Contracts) -> None:
    """Say what one call of a loss in one part counted and summed."""
    items = {name: item for name, (_, item) in held.items()}
    for name, (slot, item) in held.items():
        if name in ("target", "weight"):
            if name == "target":
                contracts.gap(slot, [item], "it was given")
            continue
        made = _made(name, items) if readable(*items.values()) else None
        if made is None:
            contracts.gap(slot, [item], WHOLE)
            continue
        reads = tuple((microbatch_of(i), s) for n, (s, i) in held.items() if n != name and n != "weight")
        exact = name == "count"
        expected = number_of(item, made, dtype="int64" if exact else "float64")
        own = None if exact else beyond_number(made, item)
        contracts.found.append(Contract(slot, microbatch_of(item), (item,), expected, reads, own))


def _made(name: str, items: dict[str, Item]) -> float | None:
    """Return what a count, a sum or a value should be, from what else was recorded of the call."""
    value, total, target = items.get("value"), items.get("sum"), items.get("target")
    meta = items[name].entry.meta
    if name == "count" and target is not None and meta.ignore_index is not None:
        return float(np.count_nonzero(target.read() != meta.ignore_index))
    if name == "sum" and value is not None and value.entry.local_shape and meta.reduction == "none":
        return float(np.sum(value.read().astype(np.float64)))
    if name == "value" and total is not None and not items[name].entry.local_shape:
        denominator = 1.0 if meta.reduction == "sum" else meta.denominator
        if meta.reduction in ("sum", "mean") and denominator:
            return float(total.read()) / denominator
    return None


def _roots(step: Step, contracts: Contracts) -> None:
    """Say what backward starts from: the losses by their weights."""
    known = known_parts(step.view)
    roots = [found for found in step.view.find(Kind.LOSS, phase="train") if found[0].name == "backward"]
    several = any(slot.call for slot, _ in roots)
    for slot, items in roots:
        for item in items:
            if several or item.entry.local_shape != () or not readable(item):
                contracts.gap(slot, [item], NOT_ALONE)
                continue
            made = known.get(item.part) if item.part else None
            there, eps = float(item.read()), max(coarser_eps((item,)), EPS["float32"])
            if made is None or abs(there - made.value) > _ROOT * eps * (abs(there) + made.size):
                contracts.gap(slot, [item], OTHER_TERM)
                continue
            units = max(made.size / abs(made.value), 1.0) if made.value else 1.0
            contracts.found.append(
                Contract(
                    slot, microbatch_of(item), (item,), number_of(item, made.value),
                    own=beyond_number(made.value, item, _ROOT * units),
                )
            )  # fmt: skip


def weighed(step: Step, objective: Objective, contracts: Contracts) -> Weighed:
    """Return the step with the weights that tokens should have; say why not, where that is not known."""
    slots = [
        (s, i) for s, items in step.view.find(Kind.LOSS, phase="train") for i in items if s.slot == "weight"
    ]
    refs = frozenset((microbatch_of(item), slot) for slot, item in slots)
    weights = weights_of(step, masked=objective.masked)
    found = weights if isinstance(weights, str) else wanted_weights(objective, step, weights)
    if isinstance(found, str) or isinstance(weights, str):
        for slot, item in slots:
            contracts.gap(slot, [item], str(found))
        return Weighed(None, refs, ())
    wanted, coefficients = found
    by_item = {id(item): value for item, value in wanted}
    items = dict(step.view.items)
    for slot in {slot for slot, _ in slots}:
        items[slot] = tuple(_with(item, by_item.get(id(item))) for item in items[slot])
    said = _said(step, weights, coefficients)
    return Weighed(replace(step.view, items=items), refs, said, weights.noise)


def _with(item: Item, value: np.ndarray | None) -> Item:
    return item if value is None else computed(item, lambda: [value])


def _weight_of_all(values: np.ndarray, noise: float) -> str:
    """Tell what every token weighs that weighs anything."""
    if not values.size:
        return "0"
    if not np.isfinite(values).any():
        return f"{values[0]:g}"
    return f"1/{1 / values[0]:.6g}" if np.allclose(values, values[0], rtol=noise, atol=0) else "various"


def _said(step: Step, weights: Weights, coefficients: dict[str, float]) -> tuple[str, ...]:
    """Tell what the tokens of each part weigh in the gradient, and what several terms are multiplied by."""
    lines = []
    for name, calls in weights.terms.items():
        by_weight: dict[str, list[str]] = defaultdict(list)
        for call in calls:
            values = effective(call, weights.factors)
            values = values[values != 0]
            told = _weight_of_all(values, weights.noise)
            count = int(call.valid.read()) if call.valid is not None else values.size
            by_weight[told].append(f"rank {call.part.rank} microbatch {call.part.number} ({count})")
        parts = "; ".join(f"{told}: {', '.join(where[:4])}" for told, where in list(by_weight.items())[:8])
        factors = [
            factor
            for term, factor in coefficients.items()
            if term.partition(" ")[0] == name.partition(" ")[0]
        ]
        times = f", {', '.join(f'{f:.6g}' for f in factors)} times the objective" if factors != [1.0] else ""
        lines.append(f"step {step.view.step}: {name}: a token weighs {parts}{times}")
    return tuple(lines)
