"""What tokens weigh in the gradient, and what they should under an objective that is declared or inferred."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.effective import noise_of_weights
from tensortrace.diff.factors import EXPLAINED, Factors
from tensortrace.diff.objective import APART, known_parts
from tensortrace.diff.plan.comparison import coarser_eps
from tensortrace.diff.rows import Batch, read_batches
from tensortrace.replay.contract import EVALUATED, Step, readable
from tensortrace.replay.gradients import averages
from tensortrace.replay.modules.losses import CLASSES
from tensortrace.tracer.types import WEIGHTED, Kind

Name = Literal["mean", "sum", "sequence-mean"]

NAMES: tuple[Name, ...] = ("mean", "sum", "sequence-mean")

WORDS: dict[Name, str] = {
    "mean": "the mean over the step's valid tokens on all ranks",
    "sum": "the sum over valid tokens",
    "sequence-mean": "the mean over sequences of each one's mean over its valid tokens",
}

UNMEASURED = "what scales gradients behind the loss is not measured: local ones do not add up to them"
WEIGHTS_GIVEN = (
    "a loss was given weights of classes or elements: whether the mean should be over these is not known"
)
NO_WEIGHTS = "no gradient came through a loss that is recognised, so that nothing tells what its tokens weigh"


@dataclass(frozen=True)
class Objective:
    """What the gradient should be the gradient of.

    ``declared`` tells whether the user said so. ``masked``: of losses that are returned token by token, those
    that the program weighs with exactly 0 are not valid.
    """

    name: Name
    declared: bool = False
    fits: bool = True
    masked: bool = False

    @property
    def text(self) -> str:
        """The objective in words."""
        if self.declared:
            return f"{WORDS[self.name]}, as declared"
        how = (
            "inferred from what tokens weigh"
            if self.fits
            else "assumed: what tokens weigh fits no other either"
        )
        return f"{WORDS[self.name]}, {how}"


class Call(NamedTuple):
    """One call of a loss in one part: what was recorded of it."""

    name: str
    number: int
    part: Part
    weight: Item
    valid: Item | None
    value: Item | None
    target: str


class Weights(NamedTuple):
    """The terms of a step's objective, each a list of calls, and the measured factors of each rank.

    ``noise`` is the relative error of what is weighed. ``alone``: one term is the whole objective, so that it
    has no coefficient.
    """

    terms: Mapping[str, list[Call]]
    factors: Factors
    noise: float
    alone: bool


def weights_of(step: Step, *, masked: bool) -> Weights | str:
    """Return what tokens weigh in a step, or why that is not known; for ``masked`` see Objective."""
    calls = list(_calls(step, masked=masked))
    if not calls:
        return NO_WEIGHTS
    if step.evaluations:
        return EVALUATED
    if any(_has_weights(call) and not _is_torchs_mean(call, calls) for call in calls):
        return WEIGHTS_GIVEN
    factors, eps = step.gradients.factors or _stated(step), _eps_of_gradients(step)
    if factors is None or factors.residual > max(EXPLAINED, 4 * eps):
        return UNMEASURED
    if any(call.part.rank not in factors.by_rank for call in calls):
        return UNMEASURED
    noise = max(
        noise_of_weights(None, factors), *(4 * coarser_eps((c.value,)) for c in calls if c.value), 0.0
    )
    terms = _terms(calls)
    return Weights(terms, _named(factors, step, eps), noise, len(terms) == 1 and not _has_other_terms(step))


def _has_weights(call: Call) -> bool:
    """Tell whether a loss was given weights; older traces tell of classes by what the mean is over."""
    meta, valid = call.weight.entry.meta, call.valid
    if meta.text == WEIGHTED:
        return True
    if call.name not in CLASSES or valid is None or valid.entry.shard is not None:
        return False
    if meta.reduction != "mean" or meta.text is not None:  # its shape of scores is told without weights only
        return False
    return meta.denominator is not None and meta.denominator != float(valid.read())


def _is_torchs_mean(call: Call, calls: Sequence[Call]) -> bool:
    """Tell whether it is known what the mean of a loss with weights is over.

    That is torch's own mean: of the only call, or over elements, which their weights do not change.
    """
    meta = call.weight.entry.meta
    return meta.reduction == "mean" and (len(calls) == 1 or call.name not in CLASSES)


def _has_other_terms(step: Step) -> bool:
    """Tell whether backward starts from more than the losses whose weights are known."""
    known, roots = known_parts(step.view), dict[Part, float]()
    for slot, items in step.view.find(Kind.LOSS, phase="train"):
        for item in items if slot.name == "backward" else ():
            if item.part is None or item.entry.local_shape != () or not readable(item):
                return True
            roots[item.part] = roots.get(item.part, 0.0) + float(item.read())
    return any(
        part not in known or abs(root - known[part].value) > APART * (abs(root) + known[part].size)
        for part, root in roots.items()
    )


def _stated(step: Step) -> Factors | None:
    """Return the factors that reductions state, where gradients have too few elements to measure them on."""
    cells = {i.cell for s, items in step.view.find(Kind.LOCAL_GRAD) if s.slot == "grad" for i in items}
    reduced = [i for _, items in step.view.find(Kind.REDUCED_GRAD) for i in items]
    means = {averages(item, step) for item in reduced} or {False}
    if len(means) != 1 or None in means or not cells or (len(cells) > 1 and not reduced):
        return None
    scale = (step.loss_scale or 1.0) if step.gradients.has_rung(Kind.UNSCALED_GRAD) else 1.0
    factor = (1 / len(cells) if means == {True} else 1.0) / scale
    return Factors(dict.fromkeys(cells, factor), 0.0)


def _eps_of_gradients(step: Step) -> float:
    """Return the spacing of the coarsest dtype in which gradients are summed."""
    found = (i for s, items in step.view.find(Kind.LOCAL_GRAD) if s.slot == "grad" for i in items)
    return coarser_eps(list(found))


def _named(factors: Factors, step: Step, eps: float) -> Factors:
    """Return factors with those replaced that are known numbers but for the round-off of gradients."""
    ranks, scale = float(len(factors.by_rank)), step.loss_scale or 1.0
    known = [number / by for number in (1.0, 1 / ranks, ranks) for by in (1.0, scale)]
    close = max(noise_of_weights(None, factors), eps)

    def named(factor: float) -> float:
        return next((n for n in known if math.isclose(factor, n, rel_tol=close)), factor)

    return replace(factors, by_rank={rank: named(factor) for rank, factor in factors.by_rank.items()})


def _calls(step: Step, *, masked: bool) -> Iterator[Call]:
    found: dict[tuple[str, int, Part], dict[str, Item]] = defaultdict(dict)
    for slot, items in step.view.find(Kind.LOSS, phase="train"):
        for item in items:
            if item.part is not None and readable(item):
                found[slot.name, slot.call, item.part][slot.slot] = item
    for (name, number, part), held in sorted(found.items()):
        if "weight" in held:
            target = held["target"].entry.digest if "target" in held else ""
            weight, valid = held["weight"], held.get("count")
            if masked and weight.entry.meta.reduction == "none":
                valid = None  # those count that weigh
            yield Call(name, number, part, weight, valid, held.get("value"), target)


def _terms(calls: Iterable[Call]) -> dict[str, list[Call]]:
    """Return the calls that are one term: parts of a batch, that is, of other tokens with the same weight.

    Calls with the same targets, or of which none are known, are terms of their own.
    """
    by_name: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_name[call.name].append(call)
    found: dict[str, list[Call]] = {}
    for name, own in by_name.items():
        numbers = {call.number for call in own}
        targets = [(call.part, call.target) for call in own]
        if len(numbers) == 1 or (len(set(targets)) == len(targets) and all(target for _, target in targets)):
            found[name] = own
        else:
            found |= {f"{name} {n}": [call for call in own if call.number == n] for n in sorted(numbers)}
    return found


def base_weights(objective: Name, calls: Iterable[Call], step: Step) -> dict[int, np.ndarray] | str:
    """Return what each token of a term's calls should weigh, by the call's event; why not, where unknown."""
    calls = list(calls)
    values = {_key(call): call.weight.read().astype(np.float64) for call in calls}
    counts = {_key(call): _count(call, values[_key(call)]) for call in calls}
    total = sum(counts.values())
    # a token that weighs nothing was masked out, but for losses that weigh nothing as a whole
    whole = all(value.size == 1 and not value.any() for value in values.values()) and total > 0
    weighs = {key: (value != 0) | whole for key, value in values.items()}
    if objective == "sum":
        return {key: np.where(each, 1.0, 0.0) for key, each in weighs.items()}
    if objective == "mean":
        if not total:
            return "no valid tokens were counted"
        return {key: np.where(each, 1 / total, 0.0) for key, each in weighs.items()}
    batch = read_batches(step.view, step.view, "train")[0]
    return _by_sequence(calls, values, counts, batch)


def _by_sequence(
    calls: Iterable[Call], values: Mapping[int, np.ndarray], counts: Mapping[int, float], batch: Batch
) -> dict[int, np.ndarray] | str:
    rows: dict[Part, int] = defaultdict(int)
    for row in batch.rows:
        rows[row.part] += not row.idle
    sequences, found = sum(rows.values()), {}
    for call in calls:
        key, extent = _key(call), batch.extents.get(call.part)
        value = values[key]
        if not rows[call.part] or extent is None:
            return "the batch's sequences are not known"
        if value.size == 1 and rows[call.part] == 1 and counts[key]:
            found[key] = np.full_like(value, 1 / counts[key] / sequences)
        elif value.size > 1 and not extent.time_major and value.size % extent.rows == 0:
            weighs = value.reshape(extent.rows, -1) != 0
            lengths = np.maximum(weighs.sum(axis=1, keepdims=True), 1)
            found[key] = np.where(weighs, 1 / lengths / sequences, 0.0).reshape(value.shape)
        else:
            return "tokens were not weighed one by one, so that those of a sequence are not told"
    return found


def _key(call: Call) -> int:
    return id(call.weight)


def _count(call: Call, weight: np.ndarray) -> float:
    if _has_weights(call) and call.weight.entry.meta.denominator:  # torch's own mean is over that
        return call.weight.entry.meta.denominator
    if call.valid is not None:
        return int(call.valid.read())
    return int(np.count_nonzero(weight))


def effective(call: Call, factors: Factors) -> np.ndarray:
    """Return what a call's tokens weigh in the gradient before clipping."""
    return np.asarray(call.weight.read().astype(np.float64) * factors.by_rank[call.part.rank])


def coefficient(calls: Iterable[Call], base: Mapping[int, np.ndarray], factors: Factors) -> float:
    """Return by what a term is multiplied in the objective: the median over its tokens."""
    ratios = [effective(call, factors)[base[_key(call)] != 0] / _nonzero(base[_key(call)]) for call in calls]
    flat = np.concatenate([np.ravel(r) for r in ratios]) if ratios else np.zeros(0)
    return float(np.median(flat)) if flat.size else math.nan


def _nonzero(values: np.ndarray) -> np.ndarray:
    return np.asarray(values[values != 0])


def _terms_under(objective: Name, step: Step, weights: Weights) -> dict[str, list[Call]]:
    """Return the terms of a step: several calls of a loss are one where their tokens weigh as one's."""
    found: dict[str, list[Call]] = {}
    for name, calls in weights.terms.items():
        numbers = sorted({call.number for call in calls})
        if len(numbers) == 1 or _fits(objective, calls, step, weights, alone=weights.alone):
            found[name] = calls
        else:
            found |= {f"{name} {n}": [call for call in calls if call.number == n] for n in numbers}
    return found


def _fits(objective: Name, calls: list[Call], step: Step, weights: Weights, *, alone: bool) -> bool:
    """Tell whether a term's tokens weigh what an objective says, up to a factor unless it is alone."""
    base = base_weights(objective, calls, step)
    if isinstance(base, str):
        return False
    factor = 1.0 if alone else coefficient(calls, base, weights.factors)
    return all(
        np.allclose(effective(call, weights.factors), base[_key(call)] * factor, rtol=weights.noise, atol=0.0)
        for call in calls
    )


def fits(objective: Name, step: Step, weights: Weights) -> bool:
    """Tell whether all tokens weigh what an objective says; of several terms, up to a factor each."""
    terms = _terms_under(objective, step, weights)
    alone = weights.alone and len(terms) == 1
    return all(_fits(objective, calls, step, weights, alone=alone) for calls in terms.values())


def wanted_weights(
    objective: Objective, step: Step, weights: Weights
) -> tuple[list[tuple[Item, np.ndarray]], dict[str, float]] | str:
    """Return what each recorded weight should be, and the coefficient of each term; why not, where unknown.

    Of a term that is the whole objective the coefficient is 1.
    """
    found: list[tuple[Item, np.ndarray]] = []
    coefficients: dict[str, float] = {}
    terms = _terms_under(objective.name, step, weights)
    alone = weights.alone and len(terms) == 1
    for name, calls in terms.items():
        base = base_weights(objective.name, calls, step)
        if isinstance(base, str):
            return base
        factor = 1.0 if alone else coefficient(calls, base, weights.factors)
        coefficients[name] = factor
        for call in calls:
            behind = weights.factors.by_rank[call.part.rank]
            found.append((call.weight, base[_key(call)] * factor / behind))
    return found, coefficients


def infer(steps: Iterable[Step], declared: Name | None = None) -> Objective:
    """Return the objective, of those that may be, which the weights of some steps fit.

    Without any it is the declared one, or the mean over tokens.
    """
    steps = list(steps)
    for masked in (False, True):
        known = [(step, w) for step in steps if not isinstance(w := weights_of(step, masked=masked), str)]
        for name in (declared,) if declared else NAMES:
            if known and all(fits(name, step, weights) for step, weights in known):
                return Objective(name, declared is not None, masked=masked)
    return Objective(declared or "mean", declared is not None, fits=False, masked=True)
