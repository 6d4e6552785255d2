"""Gradient scale accounting: what one token weighs in the gradient, and by how much more in one run.

Legal programs scale differently (a mean here, a world-size factor there, a loss scale), so gradients are
brought to one scale by *measured* weights before they are compared, and the weights themselves are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from tensortrace.diff.catalog import Part, StepView
from tensortrace.diff.extent import Extent
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import Kind

CLOSE = 2.0**-18
"""Weights are float32 products of a few factors: equal within 32 units of round-off (3.8e-6)."""

WEIGHT_TOLERANCE = 2.0**-12
"""Relative: measured factors carry the round-off of the gradients they were measured on, at most so much."""


@dataclass(frozen=True)
class TokenWeights:
    """∂(backward root)/∂(a token's loss) per part of one step; None where a part's tokens differ.

    ``count`` is each part's number of valid tokens, 0 where it was not recorded. ``tokens`` has every
    token's weight, flattened, of parts whose one loss was recorded token by token. ``broken`` has parts
    of which no weight is finite, with one of these.
    """

    weight: dict[Part, float | None]
    count: dict[Part, int]
    tokens: dict[Part, np.ndarray] = field(default_factory=dict)
    broken: dict[Part, float] = field(default_factory=dict)

    @property
    def observed(self) -> bool:
        """Tell whether every part with a loss has one weight for all of its tokens."""
        return bool(self.weight) and all(w is not None for w in self.weight.values())


@dataclass(frozen=True)
class RowScale:
    """ρ = w_b / w_a per row of ``b``; ``by_part`` is None for a part whose rows disagree."""

    by_row: dict[tuple[Part, int], float]
    by_part: dict[Part, float | None]
    observed: bool

    def of(self, row: Row) -> float:
        """Return the factor by which the gradients of one row of ``b`` are divided."""
        return self.by_row.get((row.part, row.number), 1.0)


Term = tuple[str, int]
"""A term of the objective: the name of a loss, and which call of it."""


def terms_of(view: StepView) -> set[Term]:
    """Return the terms of which a step has token weights."""
    return {(s.name, s.call) for s, _ in view.find(Kind.LOSS, phase="train") if s.slot == "weight"}


def token_weights(view: StepView, term: Term | None = None) -> TokenWeights:
    """Return each part's token weight, from the ``weight`` slots of its losses, or of one term's alone."""
    weights: dict[Part, list[float]] = {}
    counts: dict[Part, int] = {}
    masked: dict[Part, int] = {}
    tokens: dict[Part, list[np.ndarray]] = {}
    for slot, items in view.find(Kind.LOSS, phase="train"):
        for item in items:
            if item.part is None or not item.source.stored(item.entry):
                continue
            if term is not None and (slot.name, slot.call) != term:
                continue
            if slot.slot == "count":
                counts[item.part] = counts.get(item.part, 0) + int(item.read())
            elif slot.slot == "weight":
                values = np.ravel(item.read()).astype(np.float64)
                weighing = values[values != 0] if values.size > 1 else values  # of a loss, or of its terms
                weights.setdefault(item.part, []).extend(float(v) for v in weighing)
                tokens.setdefault(item.part, []).append(values)
                if values.size > 1:  # a mask applied outside the loss: what it leaves weighs nothing
                    masked[item.part] = masked.get(item.part, 0) + len(weighing)
    counts |= masked
    by_token = {part: found[0] for part, found in tokens.items() if len(found) == 1 and found[0].size > 1}
    broken = {part: found[0] for part, found in weights.items() if found and not np.isfinite(found).any()}
    return TokenWeights({part: _one(values) for part, values in weights.items()}, counts, by_token, broken)


def _one(values: list[float]) -> float | None:
    """Return the common value, None where values differ or there is none that is finite."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return None
    middle = float(np.median(finite))
    return middle if all(math.isclose(v, middle, rel_tol=CLOSE) for v in finite) else None


def row_scale(pairing: Pairing, a: TokenWeights, b: TokenWeights) -> RowScale:
    """Return ρ per row of ``b``; 1 everywhere where a weight was not observed."""
    by_row: dict[tuple[Part, int], float] = {}
    of_part: dict[Part, list[float]] = {}
    tokens = token_pairs(pairing, a, b)
    for number, (x, y) in enumerate(pairing.pairs):
        if tokens is not None:
            rho = _ratio(*tokens[number])
        else:
            w_a, w_b = a.weight.get(x.part), b.weight.get(y.part)
            if not w_a or not w_b:
                return RowScale({}, {}, observed=False)
            rho = w_b / w_a
        if rho is not None:
            by_row[(y.part, y.number)] = rho
            of_part.setdefault(y.part, []).append(rho)
    if not by_row:
        return RowScale({}, {}, observed=False)
    return RowScale(by_row, {part: _one(values) for part, values in of_part.items()}, observed=True)


def common_scale(scales: Sequence[RowScale]) -> RowScale:
    """Return the ρ that all terms of an objective agree on, row by row; not observed where they don't."""
    first, *others = scales
    for other in others:
        if not other.observed or other.by_row.keys() != first.by_row.keys():
            return RowScale({}, {}, observed=False)
        if any(
            not math.isclose(other.by_row[r], x, rel_tol=WEIGHT_TOLERANCE) for r, x in first.by_row.items()
        ):
            return RowScale({}, {}, observed=False)
    return first


def token_pairs(
    pairing: Pairing, a: TokenWeights, b: TokenWeights
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Return both runs' weights of the tokens of each matched row; None unless all were recorded so."""
    found = []
    pairing = _of_tokens(pairing, a, b)
    for x, y in pairing.pairs:
        left, right = _row_tokens(a, x, pairing.extents_a), _row_tokens(b, y, pairing.extents_b)
        if left is None or right is None or left.shape != right.shape:
            return None
        found.append((left, right))
    return found or None


def _of_tokens(pairing: Pairing, a: TokenWeights, b: TokenWeights) -> Pairing:
    """Return the pairing by the one of a row's two sequences whose tokens were weighed, or all but one."""
    second = pairing.of_answers()
    if second is None:
        return pairing
    for fewer, way in product((0, 1), (pairing, second)):
        sides = ((a, way.extents_a), (b, way.extents_b))
        if all(
            values.size == extents[part].rows * ((extents[part].positions or 0) - fewer)
            for weights, extents in sides
            for part, values in weights.tokens.items()
            if part in extents
        ):
            return way
    return pairing


def _row_tokens(weights: TokenWeights, row: Row, extents: dict[Part, Extent]) -> np.ndarray | None:
    """Return the weights of a row's valid tokens; of a loss shifted by one, of all but one."""
    values, extent = weights.tokens.get(row.part), extents.get(row.part)
    if values is None or extent is None or not extent.rows or values.size % extent.rows:
        return None
    own: np.ndarray = extent.by_row(values)[row.number]
    if extent.positions and len(own) in (extent.positions, extent.positions - 1):
        own = own[row.start : row.stop - (extent.positions - len(own))]
    return own


def _ratio(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the median ratio over tokens that weigh something in both runs; None where none does."""
    both = (a != 0) & (b != 0) & np.isfinite(a) & np.isfinite(b)
    return float(np.median(b[both] / a[both])) if both.any() else None
