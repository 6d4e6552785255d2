"""What a detector sees of an origin, and the one function that tests a hypothesis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tensortrace.diff.catalog import Catalog, Item, StepView
from tensortrace.diff.compare import EPS
from tensortrace.diff.estimate import is_estimate, vectors
from tensortrace.diff.execute import Execution
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.plan.comparison import OneSided
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Cause
from tensortrace.diff.tolerance import AMPLIFY, COMMON_FACTOR, OWN
from tensortrace.tracer.types import INIT_STEP, Kind

EXACT_FLOOR = 1e-12
"""Residual at which exactly compared values count as explained (they are float64 or integers)."""


@dataclass(frozen=True)
class Case:
    """The first origin, the origins of the same kind and slot beside it, and both runs.

    ``offset`` is what to subtract from a's step number to get b's.
    """

    origin: Outcome
    siblings: tuple[Outcome, ...]
    execution: Execution
    a: Catalog
    b: Catalog
    offset: int

    @property
    def pair(self) -> StepPair:
        """The step at which the origin lies, in both runs."""
        assert self.origin.pair is not None
        return self.origin.pair

    @property
    def one_sided(self) -> OneSided | None:
        """The origin as a boundary that one run lacks, None where both have it."""
        entry = self.origin.comparison
        return entry if isinstance(entry, OneSided) else None

    @property
    def arrays(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Both global tensors (a, b) of the origin and of its siblings."""
        found = [o.assembled for o in self.siblings if o.assembled is not None]
        return tuple((x.a.astype(np.float64), x.b.astype(np.float64)) for x in found)

    @property
    def floor(self) -> float:
        """The relative L2 error that the origin's judgement allows: a residual below it is explained."""
        judgement = self.origin.judgement
        if judgement is None:
            return EXACT_FLOOR
        return max(judgement.allowed if judgement.noise is None else judgement.noise, EXACT_FLOOR)

    @property
    def pairing(self) -> Pairing:
        """Which rows meet in the origin's pass, of training or without gradients."""
        train = self.origin.node.slot.phase != "eval"
        return self.pair.pairing if train else self.pair.eval_pairing

    @property
    def is_factor(self) -> bool:
        """Whether the origin was found by one common factor, which may lie below its noise."""
        judgement = self.origin.judgement
        return judgement is not None and judgement.reason.startswith(COMMON_FACTOR)

    @cached_property
    def world_b(self) -> int:
        """Number of ranks of ``b`` that saw their own part of the batch."""
        return len({part.rank for part in self.pair.batch_b.extents}) or len(self.b.ranks)

    @cached_property
    def microbatches_b(self) -> int:
        """Number of microbatches in a window of ``b``."""
        return self.pair.b.last_microbatch() + 1

    def gradient_floor(self, tensors: Sequence[Item]) -> float:
        """Return the relative error by which correct gradients of this step may differ.

        Their dtypes' round-off, and what the step's agreeing gradients were measured to differ by.
        """
        eps = max((EPS.get(item.entry.dtype, 0.0) for item in tensors), default=0.0)
        kinds = (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.CLIPPED_GRAD)
        step = self.origin.node.step
        errors = (
            e.rel
            for n, e in self.execution.errors.items()
            if n.step == step and n.slot.kind in kinds and not e.diverges
        )
        return AMPLIFY * (OWN * eps + max(errors, default=0.0))

    def views(self) -> Sequence[tuple[StepView, StepView]]:
        """Return the views of all steps that both runs have, in order, ``init`` excluded."""
        steps = [s for s in self.a.steps if s - self.offset in self.b.steps]
        return [(self.a.view(s), self.b.view(s - self.offset)) for s in steps if s != INIT_STEP]


@dataclass(frozen=True)
class Proposal:
    """A hypothesis: what ``b`` would be if the mistake were made in ``a``, tensor by tensor.

    ``mistaken`` and ``actual`` are aligned; ``reference`` is what ``a`` has instead. ``simplicity`` breaks
    ties between equally good explanations: lower is simpler. ``floor`` is the round-off of applying the
    mistake, where the origin itself was compared exactly or has no counterpart. ``fitted`` counts the numbers
    that were fitted to ``actual`` itself, ``tried`` the hypotheses of which this is one: both make it
    likelier that one fits by chance.
    """

    code: str
    text: str
    mistaken: Sequence[np.ndarray]
    actual: Sequence[np.ndarray]
    reference: Sequence[np.ndarray]
    number: float | None = None
    equals: str | None = None
    evidence: tuple[str, ...] = ()
    simplicity: int = 0
    floor: float = 0.0
    fitted: int = 0
    tried: int = 1


CHANCE = 0.01
"""How likely it may be that a hypothesis fits by chance, at most."""


Detector = Callable[[Case], "Iterable[Proposal]"]
"""Proposals are tested as they come: one that holds large tensors should be yielded, not listed."""


def settle(case: Case, proposal: Proposal) -> Cause | None:
    """Test a proposal; return it as a cause if it brings the residual down to the floor, else None."""
    proposal = _in_numbers(proposal)
    before = _distance(proposal.reference, proposal.actual)
    after = _distance(proposal.mistaken, proposal.actual)
    floor = max(case.floor, proposal.floor)
    if not after <= floor or not after < before or before <= proposal.floor:
        return None  # what is round-off of the mistake itself is no mistake
    if not after < 0.5 * before:
        if not (case.is_factor and _is_undone(proposal)):
            return None
    elif _by_chance(proposal, after / before) > CHANCE:
        return None
    return Cause(
        code=proposal.code,
        text=proposal.text,
        number=proposal.number,
        equals=proposal.equals,
        residual_before=before,
        residual_after=after,
        floor=floor,
        evidence=proposal.evidence,
    )


def _in_numbers(proposal: Proposal) -> Proposal:
    """Return a proposal with sketches as vectors in the place of tensors of which no more is known."""
    sides = (proposal.mistaken, proposal.actual, proposal.reference)
    if not any(is_estimate(value) for side in sides for value in side):
        return proposal
    found = [vectors(values) for values in zip(*sides, strict=True)]
    mistaken, actual, reference = zip(*found, strict=True)
    return replace(proposal, mistaken=mistaken, actual=actual, reference=reference)


def _is_undone(proposal: Proposal) -> bool:
    """Tell whether a common factor that stands out of noise is gone with the mistake made in ``a``.

    It was found through the projection, below the noise in L2, which the mistake does not undo.
    """
    before, after = (_factor(x, proposal.actual) for x in (proposal.reference, proposal.mistaken))
    return abs(after - 1) < 0.1 * abs(before - 1)


def _factor(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """Return the common factor from what is expected to what is there, over all tensors."""
    square = sum(float(np.vdot(x, x)) for x in expected)
    product = sum(float(np.vdot(x, y)) for x, y in zip(expected, actual, strict=True))
    return product / square if square and math.isfinite(square) else math.nan


def _by_chance(proposal: Proposal, left: float) -> float:
    """Return how likely one of the hypotheses tried would leave no more than a share of the difference.

    Each number that tells something leaves so much with that probability; a fitted number tells nothing.
    """
    if proposal.tried == 1 and not proposal.fitted:
        return 0.0
    telling = _telling(proposal.reference, proposal.actual) - proposal.fitted
    return proposal.tried * float(left ** min(telling, 64.0)) if telling > 0 else 1.0


def _telling(reference: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """Return how many elements the difference is spread over: as many as there are, if they differ alike."""
    squares = fourths = 0.0
    for x, y in zip(reference, actual, strict=True):
        delta = np.asarray(y, np.float64) - np.asarray(x, np.float64)
        delta = np.where(np.isfinite(delta), delta, 0.0) ** 2
        squares, fourths = squares + float(np.sum(delta)), fourths + float(np.sum(delta**2))
    return squares * (squares / fourths) if fourths else 0.0


def _distance(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> float:
    """Return the L2 distance over all tensors, relative to the greater side; infinite where shapes differ."""
    error = size_x = size_y = 0.0
    for x, y in zip(expected, actual, strict=True):
        if np.shape(x) != np.shape(y):
            return math.inf
        left, right = np.asarray(x, np.float64), np.asarray(y, np.float64)
        differ = ~((left == right) | (np.isnan(left) & np.isnan(right)))
        if not (np.isfinite(left[differ]).all() and np.isfinite(right[differ]).all()):
            return math.inf
        error += float(np.sum((right[differ] - left[differ]) ** 2))
        size_x += float(np.sum(left[np.isfinite(left)] ** 2))
        size_y += float(np.sum(right[np.isfinite(right)] ** 2))
    return math.sqrt(error / max(size_x, size_y)) if error else 0.0


def told(code: str, text: str, count: int, equals: str, *, simplicity: int = 0) -> Proposal:
    """Return a proposal whose evidence is a count, compared exactly: undoing it leaves nothing."""
    number, none = np.array(float(count)), np.array(0.0)
    return Proposal(code, text, [number], [number], [none], float(count), equals, simplicity=simplicity)
