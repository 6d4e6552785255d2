"""When a part of a case's traces says the same as all of them: what minimising must not lose."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from tensortrace.diff.result import Finding, Result
from tensortrace.replay.case import deviations, expected_of
from tensortrace.replay.result import Replay

Outcome = Result | Replay

CLOSE = 1e-3
"""How far the number of a cause may move, relative to itself, where tensors are cut."""

_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")
_ERROR = re.compile(r" \([^()]*\)$")


def first_of(result: Outcome) -> Finding | None:
    """Return the finding that the headline is about."""
    return result.first_divergent if isinstance(result, Result) else result.first_mismatch


def names_of(finding: Finding) -> frozenset[str]:
    """Return the names of a boundary and of what it was computed from, as far as they are told."""
    texts = (text.split(": ")[0].split(" ") for text in finding.inputs)
    return frozenset({finding.where.name, *(" ".join(words[1:-1]) for words in texts)})


def same(whole: Outcome, part: Outcome, *, cut: bool = False) -> bool:
    """Tell whether a part says what the whole does, for the same reasons.

    Verdict, place, cause, the headline with its numbers, ranks and evidence are the same; what the boundary
    was computed from is there and agrees, or diverges, as it did; and nothing is out of view that was not.
    Where tensors are ``cut``, numbers may be others.
    """
    said = _without_numbers if cut else str
    if deviations(expected_of(whole), expected_of(part)):
        return False
    one, other = first_of(whole), first_of(part)
    if one is None or other is None:
        return one is other
    return (
        said(whole.headline) == said(part.headline)
        and _causes(whole, said) == _causes(part, said)
        and (cut or all(map(_close, _numbers(whole), _numbers(part))))
        and _basis(one, said) == _basis(other, said)
        and bool(one.unseen) == bool(other.unseen)
    )


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)


def _causes(result: Outcome, said: Callable[[str], str]) -> list[tuple[str, str]]:
    return [(cause.code, said(cause.equals or "")) for cause in result.causes[:1]]


def _numbers(result: Outcome) -> list[float | None]:
    return [cause.number for cause in result.causes[:1]]


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=CLOSE) or (math.isnan(one) and math.isnan(other))


def _basis(finding: Finding, said: Callable[[str], str]) -> tuple[object, ...]:
    """Return on what a finding rests: ranks, evidence, and each input with whether it agrees."""
    inputs = frozenset(_ERROR.sub("", text) for text in finding.inputs)
    return finding.ranks, tuple(map(said, finding.evidence)), inputs, finding.role
