"""Gradient scale accounting: what one token weighs in the gradient, and which factors act where.

Legal programs scale differently (a mean here, a world-size factor there, a loss scale), so gradients are
brought to one scale by *measured* weights before they are compared, and the weights themselves are judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Part, StepView
from tensortrace.diff.estimate import vectors
from tensortrace.diff.extent import Extent
from tensortrace.diff.logical import Unkept
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row
from tensortrace.diff.stream import Readable
from tensortrace.tracer.types import Kind

_CHUNK = 1 << 16

CLOSE = 2.0**-18
"""Weights are float32 products of a few factors: equal within 32 units of round-off (3.8e-6)."""


@dataclass(frozen=True)
class TokenWeights:
    """∂(backward root)/∂(a token's loss) per part of one step; None where a part's tokens differ.

    ``count`` is each part's number of valid tokens, 0 where it was not recorded. ``tokens`` has every
    token's weight, flattened, of parts whose one loss was recorded token by token.
    """

    weight: dict[Part, float | None]
    count: dict[Part, int]
    tokens: dict[Part, np.ndarray] = field(default_factory=dict)

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
    return TokenWeights({part: _one(values) for part, values in weights.items()}, counts, by_token)


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


@dataclass(frozen=True)
class Factors:
    """Measured factors from each rank's local gradients to the gradient before clipping.

    ``residual`` is the relative L2 error of that explanation, the median over parameters: large where the
    stages in between did more than scale and add (a clip in the middle of a window, leftovers).
    ``uncertainty`` is what the factors may be off by, relative to the greatest: the residual, more where the
    ranks' gradients are nearly one and the same.
    """

    by_rank: dict[int, float]
    residual: float
    uncertainty: float = 0.0


def rank_factors(samples: Iterable[tuple[Mapping[int, Readable], Readable]]) -> Factors | None:
    """Return f per rank such that gradient ≈ Σ_r f_r · local_r, the median over parameters.

    Each sample is (local gradient per rank, gradient before clipping) of one parameter. Least squares per
    parameter, so that a defect of one parameter does not move the factor of its class. None where nothing
    is finite. Ranks with equal local gradients share the factor evenly (minimum-norm solution).
    """
    fits = [fit for local, gradient in samples if (fit := _fit(local, gradient))]
    greatest = max((fit.norm for fit in fits), default=0.0)
    kept = [fit for fit in fits if fit.norm > 1e-6 * greatest]
    if not kept:
        return None
    ranks = {rank for fit in kept for rank in fit.by_rank}
    median = {r: float(np.median([f.by_rank[r] for f in kept if r in f.by_rank])) for r in sorted(ranks)}
    residual, uncertainty = (
        float(np.median([getattr(fit, name) for fit in kept])) for name in ("residual", "uncertainty")
    )
    return Factors(median, residual, uncertainty)


_ALONE = 1e-5
"""Relative size below which a cell adds nothing to a gradient."""


def made_of_one(cell: int, local: Mapping[int, Readable], gradient: Readable) -> bool:
    """Tell whether a gradient is a multiple of one cell's own alone, though other cells have one too."""
    others = [r for r in local if r != cell]
    if cell not in local or not others or not all(any_nonzero(local[r]) for r in others):
        return False
    found = _fit(local, gradient)
    own = found.by_rank.get(cell, 0.0) if found else 0.0
    if found is None or not own or found.residual > _ALONE:
        return False
    return all(abs(found.by_rank.get(r, 0.0)) <= _ALONE * abs(own) for r in others)


def any_nonzero(values: Readable) -> bool:
    """Tell whether any element is not 0."""
    return any(bool(np.any(vectors([block])[0])) for block in values.blocks())


class _Fitted(NamedTuple):
    """Factors of one parameter; ``norm`` is that of the local gradients."""

    by_rank: dict[int, float]
    residual: float
    uncertainty: float
    norm: float


def _fit(local: Mapping[int, Readable], gradient: Readable) -> _Fitted | None:
    """Return the factors of one parameter; None where there is nothing to measure them on.

    Solved from inner products, which need one pass in bounded memory. They lose half of the digits of a
    float64, which gradients of float32 do not have: below a relative 1e-8 the residual is not told from 0.
    """
    ranks = sorted(local)
    if any(found.shape != gradient.shape for found in local.values()):
        return None
    products = np.zeros((len(ranks) + 1, len(ranks) + 1))
    count = 0
    with np.errstate(invalid="ignore", over="ignore"), suppress(Unkept):
        for blocks in zip(*(local[r].blocks() for r in ranks), gradient.blocks(), strict=True):
            flat = vectors(blocks)
            for start in range(0, flat[-1].size, _CHUNK):
                rows = [f[start : start + _CHUNK].astype(np.float64) for f in flat]
                for i, j in combinations_with_replacement(range(len(rows)), 2):
                    products[i, j] = products[j, i] = products[i, j] + float(rows[i] @ rows[j])
            count += flat[-1].size
    inner, towards, square = products[:-1, :-1], products[:-1, -1], float(products[-1, -1])
    norm, size = math.sqrt(float(np.trace(inner))), math.sqrt(square)
    if not (math.isfinite(norm) and math.isfinite(size)) or count < len(ranks) or not norm or not size:
        return None
    values, directions = np.linalg.eigh(inner / norm**2)
    kept = values > 1e-12 * values[-1]  # singular values of 1e-6
    basis = directions[:, kept]
    solution = basis @ ((basis.T @ (towards / norm**2)) / values[kept])
    missed = square - 2 * float(solution @ towards) + float(solution @ inner @ solution)
    residual = math.sqrt(max(missed, 0.0)) / size
    error = residual * size / (norm * math.sqrt(float(values[kept][0])))
    largest = float(np.max(np.abs(solution)))
    factors = dict(zip(ranks, (float(v) for v in solution), strict=True))
    return _Fitted(factors, residual, error / largest if largest else math.inf, norm)


def noise_of_weights(a: Factors | None, b: Factors | None) -> float:
    """Return the relative error that effective weights may have: that of the factors they were measured by.

    What tokens themselves weigh is recorded, and exact but for the round-off of a few products.
    """
    measured = max((f.uncertainty for f in (a, b) if f is not None), default=0.0)
    return min(max(CLOSE, 4 * measured), WEIGHT_TOLERANCE)


def scalar_factor(samples: Iterable[tuple[Readable, Readable]]) -> float | None:
    """Return c such that the second of each pair ≈ c · the first, the median over parameters."""
    factors = rank_factors(({0: first}, second) for first, second in samples)
    return factors.by_rank[0] if factors else None


def projected(x: Readable, y: Readable) -> float | None:
    """Return ⟨x,y⟩/⟨x,x⟩, None where x is zero or not finite, or shapes differ."""
    if x.shape != y.shape:
        return None
    square = product = 0.0
    with suppress(Unkept):
        for a, b in zip(x.blocks(), y.blocks(), strict=True):
            left, right = (v.astype(np.float64) for v in vectors([a, b]))
            square, product = square + float(left @ left), product + float(left @ right)
    return product / square if square and math.isfinite(square) else None


EXPLAINED = 1e-3
"""Residual below which the stages after ``local_grad`` are taken to scale and add only."""


def effective_weights(
    pairing: Pairing,
    a: TokenWeights,
    b: TokenWeights,
    factors_a: Factors | None,
    factors_b: Factors | None,
    *,
    same_scheme: bool,
    is_of_loss: Callable[[float], bool] = lambda _: False,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what a token of each matched row weighs in the gradient before clipping, in both runs.

    Where the runs' weights differ by one factor common to all rows, the loss is not at fault unless both
    runs are of the same scheme and the loss itself supplies the factor, or ``is_of_loss`` says of the
    factor that what reduces the gradients did not make it: else ``b`` is returned divided by it. None where
    a weight was not observed.
    """
    direct = [(a.weight.get(x.part), b.weight.get(y.part)) for x, y in pairing.pairs]
    if not direct or any(
        _is_unknown(x, a, p) or _is_unknown(y, b, q)
        for (x, y), (p, q) in zip(direct, pairing.pairs, strict=True)
    ):
        return None
    own = tuple(np.array([w[side] for w in direct], dtype=np.float64) for side in (0, 1))
    factors = factors_a, factors_b
    both = own[0], own[1]
    return _in_the_gradient(both, pairing.pairs, *factors, same_scheme=same_scheme, is_of_loss=is_of_loss)


def _is_unknown(weight: float | None, weights: TokenWeights, row: Row) -> bool:
    """Tell whether a weight says nothing: none was recorded, or no token has it."""
    return weight is None or (weight == 0 and not weights.count.get(row.part))


def effective_tokens(
    pairing: Pairing,
    a: TokenWeights,
    b: TokenWeights,
    factors_a: Factors | None,
    factors_b: Factors | None,
    *,
    same_scheme: bool,
    is_of_loss: Callable[[float], bool] = lambda _: False,
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
    factors = factors_a, factors_b
    left, right = _in_the_gradient(own, pairs, *factors, same_scheme=same_scheme, is_of_loss=is_of_loss)
    ends = np.cumsum(lengths)[:-1]
    return np.split(left, ends), np.split(right, ends)


TermWeights = dict[Term, tuple[list[np.ndarray], list[np.ndarray]]]
"""For each term what the tokens of each matched row weigh in both runs, or what each of them weighs."""


def effective_terms(
    pairing: Pairing,
    terms: Mapping[Term, tuple[TokenWeights, TokenWeights]],
    factors_a: Factors | None,
    factors_b: Factors | None,
    *,
    same_scheme: bool,
    is_of_loss: Callable[[float], bool] = lambda _: False,
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
    factors = factors_a, factors_b
    left, right = _in_the_gradient(own, pairs, *factors, same_scheme=same_scheme, is_of_loss=is_of_loss)
    ends = np.cumsum([len(x) for x, _ in values])[:-1]
    split, count = (np.split(left, ends), np.split(right, ends)), len(pairing.pairs)
    return {
        term: (split[0][n * count : (n + 1) * count], split[1][n * count : (n + 1) * count])
        for n, term in enumerate(terms)
    }


def _in_the_gradient(
    own: tuple[np.ndarray, np.ndarray],
    pairs: Sequence[tuple[Row, Row]],
    factors_a: Factors | None,
    factors_b: Factors | None,
    *,
    same_scheme: bool,
    is_of_loss: Callable[[float], bool] = lambda _: False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return weights times the factors that act on each row's part, a common factor taken out of ``b``."""
    weight_a, weight_b = own
    sides = ((factors_a, [x for x, _ in pairs]), (factors_b, [y for _, y in pairs]))
    explained = all(
        f is not None and f.residual < EXPLAINED and all(row.part.rank in f.by_rank for row in rows)
        for f, rows in sides
    )
    total_a, total_b = weight_a.copy(), weight_b.copy()
    if explained and factors_a and factors_b:
        total_a *= [factors_a.by_rank[x.part.rank] for x, _ in pairs]
        total_b *= [factors_b.by_rank[y.part.rank] for _, y in pairs]
    noise = noise_of_weights(factors_a, factors_b) if explained else CLOSE
    common = _common(total_a, total_b, noise)
    if common is None:
        return total_a, total_b
    by_its_loss = _common(weight_a, weight_b, noise)
    by_loss = (
        same_scheme
        and by_its_loss is not None
        and math.isclose(by_its_loss, common, rel_tol=WEIGHT_TOLERANCE)
    )
    return total_a, total_b if by_loss or (explained and is_of_loss(common)) else total_b / common


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


WEIGHT_TOLERANCE = 2.0**-12
"""Relative: measured factors carry the round-off of the gradients they were measured on, at most so much."""
