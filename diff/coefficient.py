"""What code of the programs' own makes of gradients between the last recorded rung and their optimizers.

No function is seen to clip, so that nobody recorded a coefficient: it is the factor that most parameters
share. One wrong gradient changes the norm, and with it what all others are scaled by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensortrace.diff.factors import projected
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.stream import Readable, one

SHARED = 1e-4
"""Relative difference up to which two parameters are scaled alike: groups may have norms of their own."""

ODD = 2.0**-16
"""Relative difference beyond which a gradient is not scaled as the others are: 128 units of round-off."""

_EXACT = 2e-6
"""Relative error of a factor that was measured on gradients of float32."""

_PARTS = 8
_LARGEST = 1e5


class ByHand(NamedTuple):
    """By what factor each parameter's gradient was shrunk in both runs, where most share one."""

    a: Mapping[str, float]
    b: Mapping[str, float]


def is_constant(factor: float) -> bool:
    """Tell whether a factor may be one over a number of ranks, microbatches or tokens: a ratio of integers.

    A coefficient of clipping comes of the data. Of numbers too great to tell it is taken for a constant.
    """
    ratio = max(factor, 1 / factor) if factor > 0 else 1.0
    if ratio > _LARGEST:
        return True
    return any(abs(ratio * n - round(ratio * n)) <= _EXACT * ratio * n for n in range(1, _PARTS + 1))


def scaled_by_hand(a: Gradients, b: Gradients, *, same_scheme: bool, tokens: int) -> ByHand | None:
    """Return what both runs' own code scales gradients by; None unless it depends on the data in one of them.

    A factor between the runs' gradients before it stays in them, but for what a program may legally leave
    to be divided out later: the number of ``tokens``, and where the schemes differ any ratio of integers.
    """
    names = [n for n in a.names if a.consumed(n) and b.consumed(n)]
    if not names or any(g.before_clip(n) for g in (a, b) for n in names):
        return None
    own_a, own_b = ({n: f for n in names if (f := _own_factor(g, n)) is not None} for g in (a, b))
    torn = is_torn(names, b)
    found_a: dict[str, float] = {}
    found_b: dict[str, float] = {}
    for members in _alike(own_a):
        held = [n for n in members if n in own_b and (not torn or len(b.consumed_copies(n)) > 1)]
        left, right = _shared([own_a[n] for n in members]), _shared([own_b[n] for n in held])
        if left is None or right is None or (is_constant(left) and is_constant(right)):
            continue
        found_a |= dict.fromkeys(members, left)
        found_b |= {n: own_b[n] if torn and n in own_b and n not in held else right for n in members}
        if len(members) == len(own_a):  # where all have one, those that tell none have it too
            unknown = [n for n in names if n not in own_a]
            found_a |= dict.fromkeys(unknown, left)
            found_b |= dict.fromkeys(unknown, right)
    if not found_a:
        return None
    ratios = [r for n in found_a if (r := _ratio(_last(a, n), _last(b, n))) is not None and r > 0]
    later = _left_for_later(ratios, tokens, same_scheme=same_scheme)
    if later != 1.0 and not _untouched(found_b.values()):
        found_b = {n: factor * later for n, factor in found_b.items()}
    return ByHand(found_a, found_b)


def _left_for_later(ratios: Sequence[float], tokens: int, *, same_scheme: bool) -> float:
    """Return what of the factor between the runs' gradients may legally be divided out by later code."""
    between = _shared(ratios)
    if between is None:  # the runs differ already: only whole numbers stand out
        middle = float(np.median(ratios)) if ratios and not same_scheme else 1.0
        return float(round(middle)) if middle >= 1 else 1 / round(1 / middle)
    largest = max(between, 1 / between)
    if abs(largest - tokens) <= ODD * largest or (not same_scheme and is_constant(between)):
        return between
    return 1.0


def _untouched(factors: Iterable[float]) -> bool:
    return all(math.isclose(f, 1.0, rel_tol=ODD) for f in factors)


def is_torn(names: Iterable[str], gradients: Gradients) -> bool:
    """Tell whether ranks scale by factors of their own: most of what they should hold alike differs."""
    held = [copies for name in names if len(copies := gradients.consumed_copies(name)) > 1]
    odd = sum(bool(odd_ranks(copies)) for copies in held)
    return len(held) > 1 and 2 * odd > len(held)


def odd_names(names: Sequence[str], a: Gradients, b: Gradients) -> set[str]:
    """Return the gradients that differ between the runs by other than what all are scaled by.

    Ranks that disagree about a gradient disagree about the norm: each scales by a factor of its own.
    """
    if is_torn(names, b):
        return _odd_on_ranks(names, a, b)
    found = set()
    for name in names:
        ratio = _ratio(a.unclipped_value(name), b.unclipped_value(name))
        if odd_ranks(b.consumed_copies(name)) or ratio is None or not math.isclose(ratio, 1.0, rel_tol=ODD):
            found.add(name)
    return found


def _odd_on_ranks(names: Sequence[str], a: Gradients, b: Gradients) -> set[str]:
    by_rank: dict[int, dict[str, float | None]] = {}
    for name in names:
        reference, copies = a.consumed(name), b.consumed_copies(name)
        for item in copies if reference is not None and len(copies) > 1 else ():
            assert reference is not None  # asked before
            by_rank.setdefault(item.source.rank, {})[name] = _ratio(one(reference), one(item))
    odd = set()
    for found in by_rank.values():
        common = _shared([factor for factor in found.values() if factor is not None])
        if common is None:
            return set()
        odd |= {n for n, f in found.items() if f is None or not math.isclose(f, common, rel_tol=ODD)}
    return odd


def _last(gradients: Gradients, name: str) -> Readable | None:
    """Return the last recorded gradient before what the optimizer consumes, where it is one."""
    copies = gradients.last_rung_copies(name)
    if copies:
        return None if odd_ranks(copies) else one(copies[0])
    local = gradients.local_sums(name)
    return next(iter(local.values())) if len(local) == 1 else None


def _own_factor(gradients: Gradients, name: str) -> float | None:
    """Return the factor from the last recorded gradient to what is consumed; None where nothing tells."""
    consumed = gradients.consumed(name)
    if consumed is None:
        return None
    last = gradients.last_rung_copies(name)
    if last and last[0].entry.digest == consumed.entry.digest:
        return 1.0  # which nobody need read
    factor = _ratio(_last(gradients, name), one(consumed))
    return factor if factor is not None and factor > 0 else None


def _ratio(x: Readable | None, y: Readable | None) -> float | None:
    found = projected(x, y) if x is not None and y is not None else None
    return found if found is not None and math.isfinite(found) else None


def _alike(factors: Mapping[str, float]) -> list[list[str]]:
    """Return the parameters that are scaled alike, of each two or more where there are several."""
    groups: list[list[str]] = []
    for name in sorted(factors, key=lambda n: factors[n]):
        if groups and math.isclose(factors[groups[-1][-1]], factors[name], rel_tol=SHARED):
            groups[-1].append(name)
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1 or len(factors) == 1]


def _shared(values: Sequence[float]) -> float | None:
    """Return the factor that more than half share; None where there is none."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = ordered[len(ordered) // 2]
    near = [v for v in ordered if math.isclose(v, middle, rel_tol=SHARED)]
    return near[len(near) // 2] if 2 * len(near) > len(ordered) else None
