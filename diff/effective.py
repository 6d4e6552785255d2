"""Effective weights: what a token weighs in the gradient before clipping, which is what runs must agree in.

That is its weight in the loss times the factors that act on its rank's gradients afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.factors import EXPLAINED, Factors
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row
from tensortrace.diff.scale import CLOSE, WEIGHT_TOLERANCE, Term, TokenWeights, token_pairs


@dataclass(frozen=True)
class Stages:
    """What acts between the losses and the gradient before clipping, in both runs.

    ``a`` and ``b`` are the measured factors, None where none are. Where the runs' weights differ by one
    factor common to all rows, the loss is not at fault unless both runs are of the same scheme and the loss
    itself supplies the factor, or ``is_of_loss`` says of the factor that what reduces the gradients did not
    make it.
    """

    a: Factors | None
    b: Factors | None
    same_scheme: bool
    is_of_loss: Callable[[float], bool] = lambda _: False


def effective_weights(
    pairing: Pairing,
    a: TokenWeights,
    b: TokenWeights,
    stages: Stages,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what a token of each matched row weighs in the gradient before clipping, in both runs.

    ``b`` is returned divided by a common factor that is not the loss's. None where a weight was not observed.
    """
    direct = [(a.weight.get(x.part), b.weight.get(y.part)) for x, y in pairing.pairs]
    if not direct or any(
        _is_unknown(x, a, p) or _is_unknown(y, b, q)
        for (x, y), (p, q) in zip(direct, pairing.pairs, strict=True)
    ):
        return None
    own = tuple(np.array([w[side] for w in direct], dtype=np.float64) for side in (0, 1))
    return _in_the_gradient((own[0], own[1]), pairing.pairs, stages)


def _is_unknown(weight: float | None, weights: TokenWeights, row: Row) -> bool:
    """Tell whether a weight says nothing: none was recorded, or no token has it."""
    return weight is None or (weight == 0 and not weights.count.get(row.part))


def effective_tokens(
    pairing: Pairing,
    a: TokenWeights,
    b: TokenWeights,
    stages: Stages,
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Return the same as ``effective_weights`` for every valid token of each matched row.

    None unless every token's own weight was recorded in both runs.
    """
    tokens = token_pairs(pairing, a, b)
    if tokens is None:
        return None
    lengths = [len(x) for x, _ in tokens]
    own = (np.concatenate([x for x, _ in tokens]), np.concatenate([y for _, y in tokens]))
    pairs = [pair for pair, length in zip(pairing.pairs, lengths, strict=True) for _ in range(length)]
    left, right = _in_the_gradient(own, pairs, stages)
    ends = np.cumsum(lengths)[:-1]
    return np.split(left, ends), np.split(right, ends)


TermWeights = dict[Term, tuple[list[np.ndarray], list[np.ndarray]]]
"""For each term what the tokens of each matched row weigh in both runs, or what each of them weighs."""


def effective_terms(
    pairing: Pairing,
    terms: Mapping[Term, tuple[TokenWeights, TokenWeights]],
    stages: Stages,
) -> TermWeights | None:
    """Return the same as ``effective_weights`` for several terms of an objective, each with its own weights.

    A common factor is one of all terms: the coefficient of one is part of the objective. None where a weight
    was not observed.
    """
    values: list[tuple[np.ndarray, np.ndarray]] = []
    for a, b in terms.values():
        rows = token_pairs(pairing, a, b) or [
            (np.array([a.weight.get(x.part) or math.nan]), np.array([b.weight.get(y.part) or math.nan]))
            for x, y in pairing.pairs
        ]
        values += rows
    if not values or any(not np.isfinite(side).all() for pair in values for side in pair):
        return None
    rows_of = [pair for _ in terms for pair in pairing.pairs]
    pairs = [pair for pair, (x, _) in zip(rows_of, values, strict=True) for _ in range(len(x))]
    own = (np.concatenate([x for x, _ in values]), np.concatenate([y for _, y in values]))
    left, right = _in_the_gradient(own, pairs, stages)
    ends = np.cumsum([len(x) for x, _ in values])[:-1]
    split, count = (np.split(left, ends), np.split(right, ends)), len(pairing.pairs)
    return {
        term: (split[0][n * count : (n + 1) * count], split[1][n * count : (n + 1) * count])
        for n, term in enumerate(terms)
    }


def _in_the_gradient(
    own: tuple[np.ndarray, np.ndarray],
    pairs: Sequence[tuple[Row, Row]],
    stages: Stages,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights times the factors that act on each row's part, a common factor taken out of ``b``."""
    weight_a, weight_b = own
    sides = ((stages.a, [x for x, _ in pairs]), (stages.b, [y for _, y in pairs]))
    explained = all(
        f is not None and f.residual < EXPLAINED and all(row.part.rank in f.by_rank for row in rows)
        for f, rows in sides
    )
    total_a, total_b = weight_a.copy(), weight_b.copy()
    if explained and stages.a and stages.b:
        total_a *= [stages.a.by_rank[x.part.rank] for x, _ in pairs]
        total_b *= [stages.b.by_rank[y.part.rank] for _, y in pairs]
    noise = noise_of_weights(stages.a, stages.b) if explained else CLOSE
    common = _common(total_a, total_b, noise)
    if common is None:
        return total_a, total_b
    by_its_loss = _common(weight_a, weight_b, noise)
    by_loss = (
        stages.same_scheme
        and by_its_loss is not None
        and math.isclose(by_its_loss, common, rel_tol=WEIGHT_TOLERANCE)
    )
    return total_a, total_b if by_loss or (explained and stages.is_of_loss(common)) else total_b / common


def _common(a: np.ndarray, b: np.ndarray, noise: float) -> float | None:
    """Return the one factor from ``a`` to ``b``; None where there is none, or other tokens weigh nothing.

    ``noise`` is the relative error of what is weighed: what differs by more is weighed otherwise.
    """
    weighing = a != 0
    if not weighing.any() or not np.array_equal(weighing, b != 0):
        return None
    ratio = b[weighing] / a[weighing]
    common = float(np.median(ratio))
    return common if np.allclose(ratio, common, rtol=noise, atol=0) else None


def noise_of_weights(a: Factors | None, b: Factors | None) -> float:
    """Return the relative error that effective weights may have: that of the factors they were measured by.

    What tokens themselves weigh is recorded, and exact but for the round-off of a few products.
    """
    measured = max((f.uncertainty for f in (a, b) if f is not None), default=0.0)
    return min(max(CLOSE, 4 * measured), WEIGHT_TOLERANCE)
