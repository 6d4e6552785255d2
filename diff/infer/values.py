"""How the tensors of a line of ranks make a whole one, by value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.infer.found import Term

CLOSE = 1e-3
"""Relative L2 error below which tensors of two correct programs are taken for the same."""


@dataclass(frozen=True)
class Candidate:
    """A split of some dimension that parameters were found to have: its term and each rank's positions."""

    term: Term
    size: int
    vectors: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Joined:
    """How parts make a whole tensor: ``same``, ``partial``, or split along ``dim`` as ``term`` says.

    ``added``: split so, and the blocks that all hold are sums.
    """

    how: str
    error: float
    dim: int = 0
    term: Term | None = None


def ways_to_join(
    parts: Sequence[np.ndarray], whole: np.ndarray, candidates: Sequence[Candidate], *, scaled: bool
) -> list[Joined]:
    """Return every way in which parts make a whole tensor, the likeliest first.

    ``scaled`` allows one positive factor: gradients of differently averaged losses.
    """
    if any(part.ndim != whole.ndim for part in parts):
        return []
    found = []

    def offer(way: Joined, value: np.ndarray) -> None:
        error = distance(value, whole, scaled=scaled)
        if error < CLOSE:
            found.append(Joined(way.how, error, way.dim, way.term))

    if all(part.shape == whole.shape for part in parts):
        if max(distance(part, whole, scaled=scaled) for part in parts) < CLOSE:
            offer(Joined("same", 0.0), parts[0])
        elif len(parts) > 1:
            offer(Joined("partial", 0.0), total(parts))
        return found
    for dim in range(whole.ndim):
        if not all(
            p.shape[:dim] + p.shape[dim + 1 :] == whole.shape[:dim] + whole.shape[dim + 1 :] for p in parts
        ):
            continue
        if sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            offer(Joined("split", 0.0, dim), np.concatenate(parts, axis=dim))
        for candidate in candidates:
            lengths = [len(v) for v in candidate.vectors]
            if candidate.size == whole.shape[dim] and lengths == [p.shape[dim] for p in parts]:
                offer(Joined("split", 0.0, dim, candidate.term), _placed(parts, whole, dim, candidate))
                if sum(lengths) > candidate.size:
                    offer(Joined("added", 0.0, dim, candidate.term), _added(parts, whole, dim, candidate))
    return found


def distance(value: np.ndarray, whole: np.ndarray, *, scaled: bool) -> float:
    """Return the relative L2 error of ``value``, infinite where the shapes differ."""
    if value.shape != whole.shape:
        return float("inf")
    x, y = value.astype(np.float64).reshape(-1), whole.astype(np.float64).reshape(-1)
    norm = float(np.linalg.norm(y))
    if scaled and (own := float(x @ x)) > 0 and (along := float(x @ y)) > 0:
        x = x * (along / own)
    error = float(np.linalg.norm(x - y))
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm if np.isfinite(error) else float("inf")


def total(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of equally shaped tensors in float64."""
    return np.asarray(np.add.reduce([part.astype(np.float64) for part in parts]))


def _added(parts: Sequence[np.ndarray], whole: np.ndarray, dim: int, candidate: Candidate) -> np.ndarray:
    value = np.zeros(whole.shape)
    for part, vector in zip(parts, candidate.vectors, strict=True):
        kept = vector >= 0
        np.moveaxis(value, dim, 0)[vector[kept]] += np.moveaxis(part, dim, 0)[kept]
    return value


def _placed(parts: Sequence[np.ndarray], whole: np.ndarray, dim: int, candidate: Candidate) -> np.ndarray:
    value = np.full(whole.shape, np.nan)
    for part, vector in zip(parts, candidate.vectors, strict=True):
        kept = vector >= 0
        np.moveaxis(value, dim, 0)[vector[kept]] = np.moveaxis(part, dim, 0)[kept]
    return value
