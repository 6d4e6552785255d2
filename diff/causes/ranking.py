"""Which of several accepted causes is named first: what is left of the difference, then simplicity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tensortrace.diff.causes.case import Case
from tensortrace.diff.result import Cause


class Accepted(NamedTuple):
    """A cause that passed its test; of its proposal what ranks it, and its detector's place in the list."""

    cause: Cause
    simplicity: int
    fitted: int
    number: int


def ranked(accepted: Iterable[Accepted], case: Case) -> tuple[Cause, ...]:
    """Return the causes, the best first, each text once.

    Residuals that are no more than round-off are ties: which of them is less is chance. Then the simpler
    cause stands first, then the one that fits fewer numbers, then the one whose detector comes first.
    """
    level = noise(case)

    def key(one: Accepted) -> tuple[float, int, int, int]:
        left = one.cause.residual_after
        return (left if left > level else 0.0, one.simplicity, one.fitted, one.number)

    found = sorted(accepted, key=key)
    known = {
        one.number for one in found if not one.fitted
    }  # a detector's own fit adds nothing to what it knows
    best = (one.cause for one in found if not (one.fitted and one.number in known))
    return tuple({(cause.code, cause.text): cause for cause in best}.values())


def noise(case: Case) -> float:
    """Return the residual up to which causes of an origin are equally good.

    That is what the origin's own judgement allows. Of what was compared exactly, or has no counterpart,
    causes are tested on other tensors, each with a floor of its own: all that were accepted are equally good.
    """
    judgement = case.origin.judgement
    exact = judgement is None or judgement.policy == "exact"
    return math.inf if exact else case.floor
