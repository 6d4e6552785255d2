"""Whether two operations' tensors agree: the diff's own judgement, on values that meet as best they can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, is_exact, measure
from tensortrace.diff.operations.meeting import MOST, SUM, Met, meetings
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.tolerance import Error, Measured, judge_exact, judge_model, measure_peak

MAX_FILLS = 3
FILL = 1e3
"""What is this much larger than everything else, and the same in both runs, was filled in."""

_NONE = Error()


@dataclass(frozen=True)
class Verdict:
    """What is known of one tensor of both runs; ``error`` is relative, 0 where nothing is known."""

    status: Literal["agrees", "diverges", "unknown"]
    why: str = ""
    how: str = ""
    error: Error = _NONE
    metrics: Metrics | None = None
    judgement: Judgement | None = None
    certain: bool = True


def unknown(why: str) -> Verdict:
    """Return what is known where nothing is."""
    return Verdict("unknown", why)


def judge(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    *,
    eps: float,
    inputs: Sequence[Error],
    terms: float = 0.0,
    sums: bool = True,
    most: bool = False,
    how: str = "",
    rows: Callable[[], Met | None] = lambda: None,
) -> Verdict:
    """Judge a tensor in the way of meeting under which it agrees best.

    ``terms`` is the norm of what was summed. ``sums`` says that contributions of ranks may add up to it,
    ``most`` that it may be the largest of them, ``how`` the one way in which it is known to be cut.
    ``rows`` brings both to one order of the batch's rows, if it can; it is asked where nothing else agrees. A
    divergence is ``certain`` only where there is no other way of meeting that could have been meant.
    """
    best: Verdict | None = None
    ways = 0
    for met in meetings(a, b):
        if (met.how == SUM and not sums) or (met.how == MOST and not most) or how not in ("", met.how):
            continue
        ways += 1
        found = _judge_one(met, eps, inputs, terms)
        if best is None or _ratio(found) < _ratio(best):
            best = found
        if found.status == "agrees":
            return found
    by_rows = rows() if len(a) != len(b) or len(a) > 1 else None
    if by_rows is not None:
        return _judge_one(by_rows, eps, inputs, terms)
    if best is None:
        shapes = f"{_shapes(a)} in a, {_shapes(b)} in b"
        return unknown(f"local shapes {shapes} tell no way to put them together")
    return best if ways == 1 else Verdict(**(vars(best) | {"certain": False}))


def _judge_one(met: Met, eps: float, inputs: Sequence[Error], terms: float) -> Verdict:
    a, b = (_numbers(side) for side in (met.a, met.b))
    if a.shape != b.shape:
        return unknown(f"shapes differ: {list(a.shape)} in a, {list(b.shape)} in b")
    a, b = _without_fill(a, b)
    metrics = measure(a, b, eps=eps or EPS["float64"])
    peak = 0.0 if metrics.equal else measure_peak([(a, b)], metrics, terms)
    coherence = measure_coherence(a.shape, [(a, b)], metrics.projection, eps or EPS["float64"])
    measured = Measured(metrics, peak, terms, coherence=None if metrics.equal else coherence)
    judgement = judge_model(measured, eps, inputs) if eps else judge_exact(metrics)
    diverges = judgement.ratio > 1
    error = Error(measured.error, peak, measured.size, diverges=diverges, coherent=measured.coherent)
    status: Literal["agrees", "diverges"] = "diverges" if judgement.ratio > 1 else "agrees"
    return Verdict(status, how=met.how, error=error, metrics=metrics, judgement=judgement)


def _without_fill(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Set to 0 in both what masks filled in both: beside -1e9 every other difference would be round-off."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return a, b
    for _ in range(MAX_FILLS):
        if not a.size:
            break
        top = np.fmax.reduce(np.abs(a), axis=None)
        filled = np.abs(a) == top
        if not np.array_equal(filled, np.abs(b) == top) or not np.array_equal(a[filled], b[filled]):
            break
        rest = max(
            (float(np.fmax.reduce(np.abs(side[~filled]), initial=0.0)) for side in (a, b)), default=0.0
        )
        if not rest * FILL < top:
            break
        a, b = np.where(filled, 0, a), np.where(filled, 0, b)
    return a, b


def _numbers(side: np.ndarray) -> np.ndarray:
    return side.astype(np.uint8) if side.dtype.kind == "b" else side


def _ratio(verdict: Verdict) -> float:
    if verdict.judgement is None:
        return math.inf
    if verdict.metrics is not None and verdict.judgement.ratio == math.inf:
        return 1e300 * (1 + (verdict.metrics.rel_l2 or 0.0))
    return verdict.judgement.ratio


def eps_of(dtypes_a: Sequence[str], dtypes_b: Sequence[str], *, coarser: bool) -> float:
    """Return the spacing by which results of these dtypes are judged, 0 for integers.

    Where both modules compute in one precision the finer one counts: an operation in a coarser dtype than
    its counterpart's is what is looked for. Else ``coarser``.
    """
    found = [
        max((EPS[dtype] for dtype in dtypes if not is_exact(dtype)), default=0.0)
        for dtypes in (dtypes_a, dtypes_b)
    ]
    if not all(found):
        return max(found)
    return max(found) if coarser else min(found)


def _shapes(parts: Sequence[np.ndarray]) -> str:
    return " and ".join(dict.fromkeys(str(list(part.shape)) for part in parts)) or "nothing"
