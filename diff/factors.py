"""Measured factors: by how much what acts after the local gradients scales them, rank by rank.

They are read from the tensors, by least squares, and not assumed from the wrapper that is said to act.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from tensortrace.diff.estimate import vectors
from tensortrace.diff.logical import Unkept
from tensortrace.diff.stream import Readable, Sum, through

_CHUNK = 1 << 16

EXPLAINED = 1e-3
"""Residual below which the stages after ``local_grad`` are taken to scale and add only."""


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
    samples = list(samples)
    if _all_as_they_were(samples):  # each gives 1, and none has to be read but one that is not 0
        samples.sort(key=lambda sample: math.prod(sample[1].shape))
        found = next((fit for local, gradient in samples if (fit := _fit(local, gradient))), None)
        return Factors(found.by_rank, found.residual, found.uncertainty) if found else None
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


def _all_as_they_were(samples: Sequence[tuple[Mapping[int, Readable], Readable]]) -> bool:
    """Tell by their digests whether all gradients are what one and the same rank alone had locally."""
    if len({rank for local, _ in samples for rank in local}) != 1:
        return False
    return all(
        isinstance(found, Sum)
        and isinstance(gradient, Sum)
        and found.shape == gradient.shape
        and found.digest is not None
        and found.digest == gradient.digest
        for local, gradient in samples
        for found in local.values()
    )


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


def _different(values: Sequence[Readable]) -> tuple[list[Readable], list[int]]:
    """Return what is not the same by its digest, to be read once, and the place in that of each value."""
    known: dict[object, int] = {}
    different: list[Readable] = []
    places = []
    for value in values:
        key = value.digest or id(value) if isinstance(value, Sum) else id(value)
        if key not in known:
            known[key] = len(different)
            different.append(value)
        places.append(known[key])
    return different, places


def _fit(local: Mapping[int, Readable], gradient: Readable) -> _Fitted | None:
    """Return the factors of one parameter; None where there is nothing to measure them on.

    Solved from inner products, which need one pass in bounded memory. They lose half of the digits of a
    float64, which gradients of float32 do not have: below a relative 1e-8 the residual is not told from 0.
    """
    ranks = sorted(local)
    if any(found.shape != gradient.shape for found in local.values()):
        return None
    different, places = _different([*(local[r] for r in ranks), gradient])
    found = np.zeros((len(different), len(different)))
    count = 0
    with np.errstate(invalid="ignore", over="ignore"), suppress(Unkept):
        for blocks in zip(*map(through, different), strict=True):
            flat = vectors(blocks)
            for start in range(0, flat[-1].size, _CHUNK):
                rows = [_real(f[start : start + _CHUNK]) for f in flat]
                for i, j in combinations_with_replacement(range(len(rows)), 2):
                    found[i, j] = found[j, i] = found[i, j] + float(rows[i] @ rows[j])
            count += flat[-1].size
    products = found[np.ix_(places, places)]
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


def _real(values: np.ndarray) -> np.ndarray:
    """Return a vector in float64, complex numbers as pairs."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values).astype(np.complex128).view(np.float64)
    return values.astype(np.float64)


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
            left, right = (_real(v) for v in vectors([a, b]))
            square, product = square + float(left @ left), product + float(left @ right)
    return product / square if square and math.isfinite(square) else None
