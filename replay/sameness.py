"""When a part of a case's traces says the same as all of them: what minimising must not lose."""

from __future__ import annotations

import math
import re

from tensortrace.diff.result import Finding, Result
from tensortrace.replay.case import deviations, expected_of
from tensortrace.replay.result import Replay

Outcome = Result | Replay

CLOSE = 1e-3
"""How far the number of a cause may move, relative to itself, where tensors are cut."""

_ERROR = re.compile(r" \([^()]*\)$")


def first_of(result: Outcome) -> Finding | None:
    """Return the finding that the headline is about."""
    return result.first_divergent if isinstance(result, Result) else result.first_mismatch


def names_of(finding: Finding) -> frozenset[str]:
    """Return the names of a boundary and of what it was computed from, as far as they are told."""
    texts = (text.split(": ")[0].split(" ") for text in finding.inputs)
    return frozenset({finding.where.name, *(" ".join(words[1:-1]) for words in texts)})


def same(whole: Outcome, part: Outcome) -> bool:
    """Tell whether a part says what the whole does, for the same reasons.

    Verdict, place, cause, the headline with its numbers, ranks and evidence are the same; what the boundary
    was computed from is there and agrees, or diverges, as it did; and nothing is out of view that was not.
    """
    if deviations(expected_of(whole), expected_of(part)):
        return False
    one, other = first_of(whole), first_of(part)
    if one is None or other is None:
        return one is other
    return (
        whole.headline == part.headline
        and _causes(whole) == _causes(part)
        and all(map(_close, _numbers(whole), _numbers(part)))
        and _basis(one) == _basis(other)
        and bool(one.unseen) == bool(other.unseen)
    )


def _causes(result: Outcome) -> list[tuple[str, str | None]]:
    return [(cause.code, cause.equals) for cause in result.causes[:1]]


def _numbers(result: Outcome) -> list[float | None]:
    return [cause.number for cause in result.causes[:1]]


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE) or (math.isnan(one) and math.isnan(other))


def _basis(finding: Finding) -> tuple[object, ...]:
    """Return on what a finding rests: ranks, evidence, and each input with whether it agrees."""
    inputs = frozenset(_ERROR.sub("", text) for text in finding.inputs)
    return finding.ranks, finding.evidence, inputs, finding.role
